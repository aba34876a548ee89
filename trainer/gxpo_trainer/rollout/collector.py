"""Streaming collection: groups are scored while later ones are still being sampled.

Both actors may die at any time. A restarted sampler receives the current weights and the prompts without a result;
groups lost to a verifier crash are resubmitted. Groups are keyed by the index of their request, so none is lost or
counted twice.
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
from gxpo_trainer.errors import LearnerDied, TrainingError, WeightsUnavailable
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import SamplerActor
from gxpo_trainer.rollout.verification import VerifierActor
from gxpo_trainer.types import Group, ScoredGroup

if TYPE_CHECKING:
    from gxpo_trainer.sync.manifest import SyncReport, WeightManifest

Event = Callable[..., None]
"""log_event(kind, message, **fields)"""

MAX_RESTARTS = 5
"""Restarts of one actor within one collection before the run fails."""

_Pending = dict[Any, tuple[list[int], list[Group]]]
"""Verdict reference → request indices and groups."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored groups in the order of the requests.

    rollout_s: time until the last group was sampled; verify_s: scoring time after that, not overlapped by sampling.
    """

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
        """Start both actors asynchronously; the first call waits for them."""
        self._start_sampler()
        self._start_verifier()

    def sync(self, manifest: WeightManifest) -> SyncReport:
        """Load a published version into the sampler and verify it. Raises WeightSyncMismatch."""
        self._manifest = manifest
        report: SyncReport = self._call_sampler("receive", manifest)
        return report

    def sampler_node(self) -> str:
        """Id of the sampler's Ray node, which decides whether it can map the learner's shared memory."""
        if self._node is None:
            self._node = str(self._call_sampler("node"))
        return self._node

    def score(self, token_ids: Sequence[Any]) -> list[Any]:
        """The sampler's log-probabilities of the given token lists, float32[length - 1] each; for the canary."""
        return list(ray.get(self.sampler.score.remote(list(token_ids))))

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score all requests with the weights of `version`. rewards: also compute reward components."""
        begin = time.perf_counter()
        groups: dict[int, Group] = {}
        pending: _Pending = {}
        restarts = 0
        while missing := [index for index in range(len(requests)) if index not in groups]:
            try:
                self._stream([requests[i] for i in missing], missing, sampling, version, rewards, groups, pending)
            except ray.exceptions.RayActorError as error:
                restarts += 1
                self._log_restart("sampler", error)
                if restarts > MAX_RESTARTS:
                    raise TrainingError(f"the sampler died {restarts} times in one step; see events.jsonl") from error
                self._start_sampler()
                if self._manifest is not None:
                    self.sync(self._manifest)
        sampled = time.perf_counter()
        scored = self._await_verdicts(pending, rewards)
        done = time.perf_counter()
        return Collected([scored[i] for i in range(len(requests))], sampled - begin, done - sampled)

    def kill(self) -> None:
        """Kill both actors."""
        for actor in (self.sampler, self.verifier):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        self.sampler = self.verifier = None

    def _stream(
        self,
        requests: list[SampleRequest],
        indices: list[int],
        sampling: SamplingSettings,
        version: int,
        rewards: bool,
        groups: dict[int, Group],
        pending: _Pending,
    ) -> None:
        """Receive groups as they finish and submit each to the verifier immediately."""
        # A step that crosses an epoch may hold a prompt twice; its groups are then interchangeable.
        open_indices: dict[str, deque[int]] = {}
        for index, request in zip(indices, requests, strict=True):
            open_indices.setdefault(request.prompt.id, deque()).append(index)
        for reference in self.sampler.generate.remote(requests, sampling, version):
            finished = ray.get(reference)
            found = [open_indices[group.prompt.id].popleft() for group in finished]
            groups.update(zip(found, finished, strict=True))
            pending[self.verifier.score.remote(finished, rewards)] = (found, finished)

    def _await_verdicts(self, pending: _Pending, rewards: bool) -> dict[int, ScoredGroup]:
        """Wait for all verdicts; groups lost to a verifier crash are resubmitted."""
        scored: dict[int, ScoredGroup] = {}
        restarts = 0
        while pending:
            failed: list[tuple[list[int], list[Group]]] = []
            for reference, (indices, batch) in pending.items():
                try:
                    scored.update(zip(indices, ray.get(reference), strict=True))
                except ray.exceptions.RayActorError as error:
                    if not failed:
                        restarts += 1
                        self._log_restart("verifier", error)
                        if restarts > MAX_RESTARTS:
                            raise TrainingError(
                                f"the verifier died {restarts} times in one step; see events.jsonl",
                                reason="verifier_failed",
                            ) from error
                        self.placement.group.back_off(restarts)
                        self._start_verifier()
                    failed.append((indices, batch))
            pending = {self.verifier.score.remote(batch, rewards): (indices, batch) for indices, batch in failed}
        return scored

    def _call_sampler(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sampler actor; if the actor dies, restart it and retry.

        Raises LearnerDied when the weights to receive were lost with their learner or are unreachable.
        """
        for restarts in range(1, MAX_RESTARTS + 1):
            try:
                return self.placement.group.get(getattr(self.sampler, method).remote(*arguments))
            except ray.exceptions.RayActorError as error:
                self._log_restart("sampler", error)
                self.placement.group.back_off(restarts)
                self._start_sampler()
            except WeightsUnavailable as error:
                raise LearnerDied(f"its published weights are unavailable ({error.cause})") from error
        raise TrainingError(f"the sampler died {MAX_RESTARTS} times while receiving weights; see events.jsonl")

    def _start_sampler(self) -> None:
        self._node = None
        if self.sampler is not None:
            # An unreachable actor may still be alive and hold its resources.
            ray.kill(self.sampler, no_restart=True)
        # A new seed for each start: the same one would repeat the first responses of the run.
        self._starts += 1
        digest = hashlib.sha256(f"{self.config.seed}/{self.attempt}/{self._starts}".encode()).digest()
        settings = replace(self._sampler_settings, seed=int.from_bytes(digest[:4], "big") >> 1)
        actor = ray.remote(SamplerActor).options(**self.placement.sampler_options())
        self.sampler = actor.remote(settings)

    def _start_verifier(self) -> None:
        actor = ray.remote(VerifierActor).options(**self.placement.verifier_options())
        self.verifier = actor.remote(self.config.verifier)

    def _log_restart(self, actor: str, error: Exception) -> None:
        cause = str(error).strip().splitlines()[0]
        self._log_event(f"{actor}_restarted", f"the {actor} died ({cause}) and was restarted")


def sampler_settings(
    config: RunConfig, placement: Placement, model_folder: str, initial_version: int | None = None
) -> SamplerSettings:
    """Sampler settings of a run; the dtype follows `learner.precision` unless `rollout.dtype` is set.

    initial_version: version of the weights in the model folder; None when a sync comes first.
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
