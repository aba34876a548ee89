"""Sampling and scoring as one stream: a group is scored while the next ones are still being sampled.

Both actors may die at any moment. A dead sampler is started anew, given the present weights, and asked for the
prompts that had not come back; a dead verifier is started anew and asked again for what it owed. Nothing is
lost and nothing is counted twice, because a group is kept by its prompt's place in the step.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import LearnerDied, TrainingError, WeightsGone
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import SamplerActor
from gxpo_trainer.rollout.verification import VerifierActor
from gxpo_trainer.types import Group, ScoredGroup

if TYPE_CHECKING:
    from gxpo_trainer.sync.manifest import SyncReport, WeightManifest

Event = Callable[..., None]
"""log_event(kind, message, **fields)"""

MOST_RESTARTS = 5
"""Restarts of one actor within one collection before the run gives up: it would die for ever."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored groups in the order of the requests. rollout_s: until the last group was sampled; verify_s: the
    rest, that is, the share of scoring that sampling did not hide."""

    groups: list[ScoredGroup]
    rollout_s: float
    verify_s: float


class SampleCollector:
    """Owns the sampler and the verifier.

    Order: `start`, `sync` of a first version, then `collect` for that version; `sync` and `collect` never overlap.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        model_folder: str,
        log_event: Event,
        initial_version: int | None = None,
    ) -> None:
        self.config, self.placement = config, placement
        self._sampler_settings = sampler_settings(config, placement, model_folder, initial_version)
        self._log_event = log_event
        self._manifest: WeightManifest | None = None
        self.attempt = 1
        self._starts = 0
        self.sampler: Any = None
        self.verifier: Any = None
        self._node: str | None = None

    def start(self) -> None:
        """Start both actors without waiting for them; the first call waits."""
        self._start_sampler()
        self._start_verifier()

    def sync(self, manifest: WeightManifest) -> SyncReport:
        """Make the sampler hold a published version, proven. Raises WeightSyncMismatch."""
        self._manifest = manifest
        report: SyncReport = self._ask_sampler("receive", manifest)
        return report

    def sampler_node(self) -> str:
        """The Ray node that the sampler runs on: whether it shares memory with the learner."""
        if self._node is None:
            self._node = str(self._ask_sampler("node"))
        return self._node

    def score(self, token_ids: Sequence[Any]) -> list[Any]:
        """The sampler's log-probabilities of given token lists, [length] each; for the canary."""
        return list(ray.get(self.sampler.score.remote(list(token_ids))))

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score all requests by the weights of `version`. rewards: also the reward's components."""
        begin = time.perf_counter()
        groups: dict[int, Group] = {}
        owed: dict[Any, tuple[list[int], Any]] = {}
        restarts = 0
        while missing := [index for index in range(len(requests)) if index not in groups]:
            try:
                self._stream([requests[i] for i in missing], missing, sampling, version, rewards, groups, owed)
            except ray.exceptions.RayActorError as error:
                restarts += 1
                self._note("sampler", error)
                if restarts > MOST_RESTARTS:
                    raise TrainingError(f"the sampler died {restarts} times in one step; see events.jsonl") from error
                self._start_sampler()
                if self._manifest is not None:
                    self.sync(self._manifest)
        sampled = time.perf_counter()
        scored = self._settle(owed, rewards)
        done = time.perf_counter()
        return Collected([scored[i] for i in range(len(requests))], sampled - begin, done - sampled)

    def kill(self) -> None:
        """End both actors."""
        for actor in (self.sampler, self.verifier):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        self.sampler = self.verifier = None

    def _stream(
        self,
        requests: list[SampleRequest],
        places: list[int],
        sampling: SamplingSettings,
        version: int,
        rewards: bool,
        groups: dict[int, Group],
        owed: dict[Any, tuple[list[int], Any]],
    ) -> None:
        """Take groups as they finish and hand each to the verifier at once, by reference."""
        # A prompt may stand twice in a step that crosses an epoch; its groups are then interchangeable.
        waiting: dict[str, deque[int]] = {}
        for place, request in zip(places, requests, strict=True):
            waiting.setdefault(request.prompt.id, deque()).append(place)
        for reference in self.sampler.generate.remote(requests, sampling, version):
            arrived = ray.get(reference)
            found = [waiting[group.prompt.id].popleft() for group in arrived]
            groups.update(zip(found, arrived, strict=True))
            owed[self.verifier.score.remote(arrived, rewards)] = (found, arrived)

    def _settle(self, owed: dict[Any, tuple[list[int], Any]], rewards: bool) -> dict[int, ScoredGroup]:
        """Wait for all verdicts; what a dead verifier owed is asked of the next one."""
        scored: dict[int, ScoredGroup] = {}
        restarts = 0
        while owed:
            failed: list[tuple[list[int], Any]] = []
            for reference, (places, batch) in owed.items():
                try:
                    scored.update(zip(places, ray.get(reference), strict=True))
                except ray.exceptions.RayActorError as error:
                    if not failed:
                        restarts += 1
                        self._note("verifier", error)
                        if restarts > MOST_RESTARTS:
                            raise TrainingError(
                                f"the verifier died {restarts} times in one step; see events.jsonl",
                                reason="verifier_failed",
                            ) from error
                        self.placement.seats.pause(restarts)
                        self._start_verifier()
                    failed.append((places, batch))
            owed = {self.verifier.score.remote(batch, rewards): (places, batch) for places, batch in failed}
        return scored

    def _ask_sampler(self, method: str, *arguments: Any) -> Any:
        """The sampler's answer; one that dies meanwhile is started anew and asked again.

        Raises LearnerDied when the weights that it is given are gone with their learner, or out of its reach.
        """
        for restarts in range(1, MOST_RESTARTS + 1):
            try:
                return self.placement.seats.answer(getattr(self.sampler, method).remote(*arguments))
            except ray.exceptions.RayActorError as error:
                self._note("sampler", error)
                self.placement.seats.pause(restarts)
                self._start_sampler()
            except WeightsGone as error:
                raise LearnerDied(f"its weights cannot be had any more ({error.cause})") from error
        raise TrainingError(f"the sampler died {MOST_RESTARTS} times while it received weights; see events.jsonl")

    def _start_sampler(self) -> None:
        self._node = None
        if self.sampler is not None:
            # One that could not be reached may live, and would keep its place.
            ray.kill(self.sampler, no_restart=True)
        # Another seed each time: the same one would draw the first responses of the run again.
        self._starts += 1
        digest = hashlib.sha256(f"{self.config.seed}/{self.attempt}/{self._starts}".encode()).digest()
        settings = replace(self._sampler_settings, seed=int.from_bytes(digest[:4], "big") >> 1)
        actor = ray.remote(SamplerActor).options(**self.placement.sampler_options())
        self.sampler = actor.remote(settings)

    def _start_verifier(self) -> None:
        actor = ray.remote(VerifierActor).options(**self.placement.verifier_options())
        self.verifier = actor.remote(self.config.verifier)

    def _note(self, who: str, error: Exception) -> None:
        cause = str(error).strip().splitlines()[0]
        self._log_event(f"{who}_restarted", f"the {who} died ({cause}) and was started anew")


def sampler_settings(
    config: RunConfig, placement: Placement, model_folder: str, initial_version: int | None = None
) -> SamplerSettings:
    """The sampler of a run: the learner's precision unless `rollout.dtype` says otherwise.

    initial_version: the version that the folder's own weights count as; None when a sync comes first.
    """
    automatic = "float32" if config.learner.precision == "fp32" else "bfloat16"
    return SamplerSettings(
        model=model_folder,
        max_length=config.model.max_length,
        dtype=automatic if config.rollout.dtype == "auto" else config.rollout.dtype,
        device=placement.device,
        threads=placement.sampler_threads,
        seed=config.seed,
        max_num_seqs=config.rollout.max_num_seqs,
        cpu_kv_cache_gib=config.rollout.cpu_kv_cache_gib,
        gpu_memory_utilization=config.rollout.gpu_memory_utilization,
        enforce_eager=config.rollout.enforce_eager,
        tensor_parallel=config.placement.tensor_parallel,
        trust_remote_code=config.model.trust_remote_code,
        initial_version=initial_version,
    )
