"""The run's verifier actor, restarted when it dies; groups lost with it are submitted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.cluster.stacks import print_stacks
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import Stalled, TrainingError
from gxpo_trainer.rollout.engines import MAX_RESTARTS, Event
from gxpo_trainer.rollout.verification import VerifierActor
from gxpo_trainer.types import Verdict


@dataclass(frozen=True, slots=True)
class Submitted:
    """Finished groups in the object store, and the indices of their requests."""

    indices: Sequence[int]
    groups: Any


class VerifierHandle:
    """Submits groups by reference: they go from the engine to the verifier without passing through this process."""

    def __init__(self, config: RunConfig, placement: Placement, log_event: Event) -> None:
        self._config, self._placement, self._log_event = config, placement, log_event
        self.actor: Any = None
        self._traced: Any = None

    def start(self) -> None:
        actor = ray.remote(VerifierActor).options(**self._placement.verifier_options())
        self.actor = actor.remote(self._config.verifier)
        self._traced = self.actor.trace.remote()

    def submit(self, finished: Any, rewards: bool) -> Any:
        """Score FinishedGroups, given as an object reference; returns a reference of their verdicts."""
        return self.actor.score.remote(finished, rewards)

    def await_verdicts(self, pending: dict[Any, Submitted], rewards: bool) -> dict[int, Sequence[Verdict]]:
        """Verdicts of each request. Raises TrainingError when the verifier dies repeatedly."""
        verdicts: dict[int, Sequence[Verdict]] = {}
        restarts = 0
        while pending:
            lost: list[Submitted] = []
            for reference, submitted in pending.items():
                try:
                    verdicts.update(zip(submitted.indices, self._verdicts(reference), strict=True))
                except (ray.exceptions.RayActorError, Stalled) as error:
                    if not lost:
                        restarts += 1
                        self._restart(restarts, error)
                    lost.append(submitted)
            pending = {self.submit(submitted.groups, rewards): submitted for submitted in lost}
        return verdicts

    def _verdicts(self, reference: Any) -> Any:
        return self._placement.group.get(reference, "verifying")

    def kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        self.actor = None

    def _restart(self, restarts: int, error: Exception) -> None:
        cause = str(error).strip().splitlines()[0]
        what = "stalled" if isinstance(error, Stalled) else "died"
        self._log_event("verifier_restarted", f"the verifier {what} ({cause}) and was restarted")
        if isinstance(error, Stalled):
            ready, _ = ray.wait([self._traced], timeout=0)
            print_stacks("verifier", ray.get(ready[0]) if ready else None)
        self.kill()  # a stalled one is alive; its other calls fail with it
        if restarts > MAX_RESTARTS:
            raise TrainingError(
                f"the verifier {what} {restarts} times in one step; see events.jsonl", reason="verifier_failed"
            ) from error
        self._placement.group.back_off(restarts)
        self.start()
