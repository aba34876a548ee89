"""N sampling engines and the verifier as one: groups are scored while later ones are still being sampled.

Any actor may die at any time. The unfinished requests of a dead engine go to the others at once; the engine is
restarted, synced and takes requests again. Groups are keyed by the index of their request, so none is lost or counted
twice, and no answer is dropped because it is slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.cluster.shared_devices import Devices, SeparateDevices
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.rollout.dispatch import Dispatcher
from gxpo_trainer.rollout.engines import Engine, Engines, Event, sampler_settings
from gxpo_trainer.rollout.requests import FinishedGroups, SampleRequest, SamplingSettings, StreamEnd
from gxpo_trainer.rollout.verifier_handle import Submitted, VerifierHandle
from gxpo_trainer.rollout.weight_sync import PoolSync, WeightSource, WeightSync
from gxpo_trainer.types import Group, ScoredGroup


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
    """Owns the engines and the verifier.

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
        self._weight_sync = WeightSync(self.engines, config.placement.tensor_parallel)
        self._streams = 0

    def start(self) -> None:
        """Start all actors without waiting; the first call waits for them."""
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
            if (synced := self._sync(version, self.engines.ready)) is not None:
                return synced

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]], version: int) -> list[list[npt.NDArray[np.float32]]]:
        """Log-probabilities of the given token lists by each engine that holds `version`, float32[length - 1] each.

        An engine that dies is left out, unless none is left: then the first that starts again is synced.
        """
        self.devices.need("sampling")
        while True:
            calls = [(engine, engine.actor.score.remote(list(token_ids))) for engine in self.catch_up(version)]
            if scores := self.engines.answers(calls):
                return scores
            self.engines.await_ready(every=False)

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score all requests with the weights of `version`. rewards: also compute reward components."""
        self.devices.need("sampling")
        collection = _Collection(self, requests, sampling, version, rewards)
        begin = time.perf_counter()
        try:
            collection.sample()
        except BaseException:
            collection.abort()
            raise
        sampled = time.perf_counter()
        verdicts = self.verifier.await_verdicts(collection.pending, rewards)
        done = time.perf_counter()
        for engine in self.engines.ready:
            engine.restarts = 0
        scored = [ScoredGroup(collection.groups[index], tuple(verdicts[index])) for index in range(len(requests))]
        return Collected(
            scored,
            rollout_s=sampled - begin,
            verify_s=done - sampled,
            idle_fraction=collection.idle_fraction(sampled - begin),
            engines_alive=len(self.engines.ready),
        )

    def kill(self) -> None:
        """Kill all actors."""
        self.engines.kill()
        self.verifier.kill()

    def next_stream(self) -> int:
        self._streams += 1
        return self._streams

    def catch_up(self, version: int) -> list[Engine]:
        """Sync the ready engines that hold another version, all of them at once; those that then hold `version`.

        On shared GPUs no engine may be sampling: all of them sleep while the learner sends its weights.
        """
        behind = [engine for engine in self.engines.ready if engine.version != version]
        if behind:
            self.devices.need("syncing")
            self._sync(version, behind)
            self.devices.need("sampling")
        return [engine for engine in self.engines.ready if engine.version == version]

    def _sync(self, version: int, engines: Sequence[Engine]) -> PoolSync | None:
        """Sync these engines; None when all of them died."""
        if self.source is None:
            raise TrainingError("this pool has no source of weights; its engines keep those of the model folder")
        return self._weight_sync.run(self.source, version, engines)


class _Collection:
    """The state of one `collect`: streams of the engines, finished groups, verdicts under way."""

    def __init__(
        self,
        pool: RolloutPool,
        requests: Sequence[SampleRequest],
        sampling: SamplingSettings,
        version: int,
        rewards: bool,
    ) -> None:
        self._pool, self._requests, self._sampling, self._version = pool, requests, sampling, version
        self._rewards = rewards
        self._group = pool.engines.placement.group
        self._stream_id = pool.next_stream()
        self._streams: dict[Any, Engine] = {}
        self._closed: set[int] = set()
        self._busy_s: list[float] = []
        self._dispatcher = Dispatcher(
            [r.num_samples * (len(r.prompt_token_ids) + sampling.max_new_tokens) for r in requests],
            [r.num_samples for r in requests],
            pool.config.rollout.max_num_seqs,
        )
        self.groups: dict[int, Group] = {}
        self.pending: dict[Any, Submitted] = {}

    def sample(self) -> None:
        """Run until every request has its group and every stream has ended."""
        while not self._dispatcher.done:
            if not self._streams:
                self._open_streams()
            self._submit()
            starting = {engine.status: engine for engine in self._pool.engines.all if engine.starting}
            for ready in self._group.wait_for_one([*self._streams, *starting]):
                if ready in self._streams:
                    self._receive(ready)
                else:
                    self._admit(starting[ready])
        while self._streams:
            self._submit()
            for ready in self._group.wait_for_one([*self._streams]):
                self._receive(ready)

    def abort(self) -> None:
        """End all streams; their unfinished requests are dropped."""
        for engine in self._streams.values():
            engine.actor.abort.remote(self._stream_id)

    def idle_fraction(self, elapsed_s: float) -> float:
        """Mean over the engines whose stream came to its end; 0 when none did."""
        if not self._busy_s or elapsed_s <= 0:
            return 0.0
        return max(0.0, 1.0 - float(np.mean(self._busy_s)) / elapsed_s)

    def _admit(self, engine: Engine) -> None:
        """A restarted engine takes requests once it holds the version.

        On shared GPUs it waits until no other engine samples, because the learner's weights must come back first.
        """
        if self._pool.engines.settle(engine) and not (self._streams and self._pool.devices.shared):
            self._open_streams()

    def _open_streams(self) -> None:
        """Open a stream on each engine that has none and holds the version."""
        sampling = {engine.index for engine in self._streams.values()}
        for engine in self._pool.catch_up(self._version):
            if engine.index not in sampling:
                stream = engine.actor.stream.remote(self._stream_id, self._sampling, self._version)
                self._streams[stream] = engine
                self._dispatcher.add_engine(engine.index)

    def _submit(self) -> None:
        """Give every engine its next requests; close the streams when none is left."""
        assigned = self._dispatcher.assign()
        for engine in self._streams.values():
            indices = assigned.get(engine.index, [])
            close = self._dispatcher.done and engine.index not in self._closed
            if indices or close:
                engine.actor.submit.remote(
                    self._stream_id, [(index, self._requests[index]) for index in indices], close
                )
            if close:
                self._closed.add(engine.index)

    def _receive(self, stream: Any) -> None:
        """Take one item of a stream; a group goes to the verifier by reference."""
        engine = self._streams[stream]
        try:
            reference = next(stream)
            item = ray.get(reference)
        except StopIteration:
            del self._streams[stream]
            return
        except ray.exceptions.RayActorError as error:
            del self._streams[stream]
            self._dispatcher.remove_engine(engine.index)
            self._pool.engines.restart(engine, error)
            return
        if isinstance(item, StreamEnd):
            self._busy_s.append(item.busy_s)
            return
        self._keep(engine, reference, item)

    def _keep(self, engine: Engine, reference: Any, item: FinishedGroups) -> None:
        fresh = [self._dispatcher.finish(engine.index, index) for index in item.indices]
        assert all(fresh), "an engine delivered a group that it no longer owned"
        self.groups.update(zip(item.indices, item.groups, strict=True))
        call = self._pool.verifier.submit(reference, self._rewards)
        self.pending[call] = Submitted(item.indices, reference)
