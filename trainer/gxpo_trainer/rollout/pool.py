"""N sampling engines and the verifier as one: groups are scored while later ones are still being sampled.

Any actor may die at any time. The unfinished requests of a dead engine go to the others at once; the engine is
restarted, synced and takes requests again. Groups are keyed by the index of their request, so none is lost or counted
twice, and no answer is dropped because it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.cluster.shared_devices import Devices, SeparateDevices
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.rollout.collection import Collection
from gxpo_trainer.rollout.engines import Engine, Engines, Event, sampler_settings
from gxpo_trainer.rollout.environment_actor import RunEnvironments
from gxpo_trainer.rollout.requests import SampleRequest, SamplingSettings
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.rollout.verifier_handle import VerifierHandle
from gxpo_trainer.rollout.weight_sync import PoolSync, WeightSource, WeightSync
from gxpo_trainer.types import ScoredGroup


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored groups in the order of the requests.

    rollout_s: time until the last group was sampled; verify_s: scoring time after that, not overlapped by sampling.
    idle_fraction: share of `rollout_s` in which an engine did not sample, mean over engines.
    """

    groups: list[ScoredGroup]
    rollout_s: float
    verify_s: float
    idle_fraction: float
    engines_alive: int


class RolloutPool:
    """Owns the engines, the verifier and the environments.

    Order: `start`, `sync` of a first version, then `collect` for that version; `sync` and `collect` never overlap.
    source: publishes the weights; None when the engines keep those of their model folder.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        model_folder: str,
        log_event: Event,
        *,
        source: WeightSource | None = None,
        initial_version: int | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.devices: Devices = SeparateDevices()
        """Decides who has the GPUs, where learner and engines share them."""
        settings = sampler_settings(config, placement, model_folder, initial_version)
        self.engines = Engines(config, placement, settings, log_event)
        self.verifier = VerifierHandle(config, placement, log_event)
        self.environments = RunEnvironments(config, placement)
        self._weight_sync = WeightSync(self.engines, config.placement.tensor_parallel)
        self.timeline = Timeline()
        self._streams = 0

    def start(self) -> None:
        """Start all actors without waiting; the first call waits for them."""
        self.engines.environments = self.environments.start()
        self.engines.start()
        self.verifier.start()

    def nodes(self) -> list[str]:
        """Ray nodes of the engines that are ready."""
        return [engine.node for engine in self.engines.ready]

    def sync(self, version: int) -> PoolSync:
        """Load the source's weights into every engine and verify them. Raises WeightSyncMismatch, LearnerDied.

        An engine that is still starting is synced when it joins a collection.
        """
        first = all(engine.version is None for engine in self.engines.all)
        while True:
            if self.engines.all_lost:
                self.devices.engines_start()
            self.devices.need("syncing")
            self.engines.await_ready(every=first)
            if (synced := self.sync_engines(self.engines.ready, version)) is not None:
                return synced

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]], version: int) -> list[list[npt.NDArray[np.float32]]]:
        """Log-probabilities of the given token lists by each engine that holds `version`, float32[length - 1] each.

        An engine that dies is left out, unless none is left: then the first that starts again is synced.
        """
        self.devices.need("sampling")
        while True:
            calls = [(engine, engine.actor.score.remote(list(token_ids))) for engine in self.catch_up(version)]
            if scores := self.engines.answers(calls, "sampling"):
                return scores
            self.engines.await_ready(every=False)

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score all requests with the weights of `version`. rewards: also compute reward components."""
        self.devices.need("sampling")
        collection = Collection(self, sampling, lambda: self.catch_up(version))
        indices = collection.add(requests, rewards=rewards)
        watch = self.engines.placement.group.watch
        begin = watch.working_s
        try:
            while not collection.complete(indices):
                collection.advance()
            collection.finish()
        except BaseException:
            collection.abort()
            raise
        sampled = watch.working_s
        groups = collection.take(indices)
        self.reset_restarts()
        return Collected(
            groups,
            rollout_s=sampled - begin,
            verify_s=watch.working_s - sampled,
            idle_fraction=collection.idle_fraction(sampled - begin),
            engines_alive=len(self.engines.ready),
        )

    def reset_restarts(self) -> None:
        """Requests were completed: only restarts after this moment are restarts in a row."""
        for engine in self.engines.ready:
            engine.restarts = 0

    def kill(self) -> None:
        """Kill all actors."""
        self.engines.kill()
        self.verifier.kill()
        self.environments.kill()

    def next_stream(self) -> int:
        self._streams += 1
        return self._streams

    def catch_up(self, version: int) -> list[Engine]:
        """Sync the ready engines that hold another version, all of them at once; those that then hold `version`.

        Where engines and learner alternate, no engine may be sampling: all of them sleep while the weights are sent.
        """
        if any(engine.version != version for engine in self.engines.ready):
            self.devices.need("syncing")  # may wait for engines that are starting, which are behind as well
            self.sync_engines([engine for engine in self.engines.ready if engine.version != version], version)
            self.devices.need("sampling")
        return [engine for engine in self.engines.ready if engine.version == version]

    def sync_engines(self, engines: Sequence[Engine], version: int) -> PoolSync | None:
        """Sync these engines, also while they are sampling; None when all of them died."""
        if self.source is None:
            raise TrainingError("this pool has no source of weights; its engines keep those of the model folder")
        processes = ["learner", *(engine.name for engine in engines)]
        for process in processes:
            self.timeline.enter(process, "syncing")
        try:
            return self._weight_sync.run(self.source, version, engines)
        finally:
            for process in processes:
                self.timeline.enter(process, None)
