"""N sampling engines and the verifier as one: groups are scored while later ones are still being sampled.

Any actor may die at any time. The unfinished requests of a dead engine go to the others at once; the engine is
restarted, synced and takes requests again. Groups are keyed by the index of their request, so none is lost or counted
twice, and no response is dropped because it is slow.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.errors import Stalled, TrainingError
from gxpo_trainer.rollout.engines import Engine, Engines, WeightSource
from gxpo_trainer.rollout.environments import EnvironmentHandle, start_environments
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.rollout.verification import Submitted, VerifierHandle
from gxpo_trainer.rollout.vllm_driver import Sampled, SampleRequest, SamplingSettings
from gxpo_trainer.runtime.deaths import ACTOR_LOST
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.placement_group import result_of
from gxpo_trainer.runtime.ray_session import Event
from gxpo_trainer.runtime.shared_devices import Devices
from gxpo_trainer.types import Group, ScoredGroup, Verdict
from gxpo_trainer.weights.buckets import SyncReport


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored groups in the order of the requests.

    rollout_s: time until the last group was sampled; verify_s: scoring time after that, not overlapped by sampling.
    elapsed_s: since the collection began or last returned groups, until the last group was sampled. busy_s: of this
    time, what an engine spent in its steps, mean over engines.
    """

    groups: list[ScoredGroup]
    rollout_s: float
    verify_s: float
    elapsed_s: float
    busy_s: float
    engines_alive: int


class RolloutPool:
    """The engines, the verifier and the environments of a run.

    Order: `start`, `sync` of a first version, then `collect` for that version; `sync` and `collect` never overlap.
    source: publishes the weights; None when the engines keep those of their model folder.
    """

    def __init__(
        self, config: RunConfig, engines: Engines, *, source: WeightSource | None = None, devices: Devices | None = None
    ) -> None:
        self.config, self.engines = config, engines
        self.devices = devices or Devices()
        self.group = engines.placement.group
        self.verifier = VerifierHandle(config, engines.placement, engines.log_event)
        self.environments: EnvironmentHandle | None = None
        self.timeline = Timeline()
        self.stream_ids = itertools.count(1)
        self._source = source

    def start(self) -> None:
        """Start all actors without waiting; the first call waits for them."""
        self.environments = start_environments(self.config, self.engines.placement)
        self.engines.start(self.environments)
        self.verifier.start()

    def sync(self, version: int) -> SyncReport:
        """Load the source's weights into every engine and verify them. Raises WeightSyncMismatch, LearnerDied.

        An engine that is still starting is synced when it joins a collection.
        """
        first = all(engine.version is None for engine in self.engines.all)
        while True:
            if all(engine.actor is None for engine in self.engines.all):  # they died while none may start
                self.devices.engines_start()
            self.devices.need("syncing")
            self.engines.await_ready(every=first)
            if (synced := self.sync_engines(self.engines.ready, version)) is not None:
                return synced

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]], version: int) -> list[list[npt.NDArray[np.float32]]]:
        """Log-probabilities of the given token lists by each engine that holds `version`, float32[length - 1] each.

        An engine that dies is left out; when all have died, the first that starts again is synced.
        """
        self.devices.need("sampling")
        while True:
            calls = [(engine, engine.actor.score.remote(list(token_ids))) for engine in self.catch_up(version)]
            if scores := self.engines.results(calls, "sampling"):
                return scores
            self.engines.await_ready(every=False)

    def collect(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> Collected:
        """Sample and score all requests with the weights of `version`."""
        self.devices.need("sampling")
        collection = Collection(self, sampling, lambda: self.catch_up(version))
        try:
            return collection.await_groups(collection.add(requests), last=True)
        except BaseException:
            collection.abort()
            raise

    def catch_up(self, version: int) -> list[Engine]:
        """Sync the ready engines that hold another version, all of them at once; those that then hold `version`.

        Where engines and learner alternate, no engine may be sampling: all of them sleep while the weights are sent,
        and those that give up their weights for it are synced as well.
        """
        if any(engine.version != version for engine in self.engines.ready):
            with self.group.watch.excluded():  # part of a restart
                self.devices.need("syncing")  # may wait for engines that are starting, which are behind as well
                self.sync_engines([engine for engine in self.engines.ready if engine.version != version], version)
                self.devices.need("sampling")
        return [engine for engine in self.engines.ready if engine.version == version]

    def sync_engines(self, engines: Sequence[Engine], version: int) -> SyncReport | None:
        """Sync these engines, also while they are sampling; None when all of them died."""
        if self._source is None:
            raise TrainingError("this pool has no source of weights; its engines keep those of the model folder")
        with ExitStack() as activities:
            for process in ("learner", *(engine.name for engine in engines)):
                activities.enter_context(self.timeline.during(process, "syncing"))
            return self.engines.sync(self._source, version, engines)

    def kill(self) -> None:
        self.engines.kill()
        self.verifier.kill()
        if self.environments is not None:
            self.environments.kill()


def build_pool(
    config: RunConfig, placement: Placement, model_folder: str, log_event: Event, *, source: WeightSource | None = None
) -> RolloutPool:
    """A pool without a learner group. source: of its weights; None: it keeps version 0, that of the model folder."""
    engines = Engines(config, placement, model_folder, log_event, initial_version=None if source else 0)
    return RolloutPool(config, engines, source=source)


class Dispatcher:
    """Assigns requests to engines; every request is open in exactly one engine, waiting, or finished.

    The next request goes to the engine with the fewest unfinished tokens among those with room for it, so a slow engine
    gets less. An engine holds at most `max_sequences`, and one request beyond, so that it never runs out.
    """

    def __init__(self, max_sequences: int) -> None:
        self._tokens: list[int] = []
        self._sequences: list[int] = []
        self._max_sequences = max_sequences
        self._waiting: deque[int] = deque()
        self.open: dict[int, set[int]] = {}
        """Unfinished requests of each engine."""
        self.finished: set[int] = set()

    def add(self, tokens: Sequence[int], sequences: Sequence[int], *, first: bool = False) -> list[int]:
        """Add requests; their indices. tokens: the most that each can take. first: before those that wait."""
        added = list(range(len(self._tokens), len(self._tokens) + len(tokens)))
        self._tokens += tokens
        self._sequences += sequences
        if first:
            self._waiting.extendleft(reversed(added))
        else:
            self._waiting.extend(added)
        return added

    @property
    def done(self) -> bool:
        """Whether every request that was added is finished."""
        return len(self.finished) == len(self._tokens)

    def add_engine(self, engine: int) -> None:
        self.open[engine] = set()

    def remove_engine(self, engine: int) -> None:
        """The engine is lost: its unfinished requests are assigned again, before the others."""
        self._waiting.extendleft(sorted(self.open.pop(engine), reverse=True))

    def assign(self) -> dict[int, list[int]]:
        """Indices of the requests to submit now, by engine."""
        assigned: dict[int, list[int]] = {}
        tokens = {engine: sum(self._tokens[i] for i in indices) for engine, indices in self.open.items()}
        sequences = {engine: sum(self._sequences[i] for i in indices) for engine, indices in self.open.items()}
        while self._waiting:
            free = [engine for engine in self.open if sequences[engine] < self._max_sequences]
            if not free:
                break
            engine = min(free, key=lambda candidate: (tokens[candidate], candidate))
            index = self._waiting.popleft()
            self.open[engine].add(index)
            tokens[engine] += self._tokens[index]
            sequences[engine] += self._sequences[index]
            assigned.setdefault(engine, []).append(index)
        return assigned

    def finish(self, engine: int, index: int) -> None:
        """Record a result. Raises KeyError when the request is not open in this engine."""
        self.open[engine].remove(index)
        self.finished.add(index)


class Collection:
    """Samples and scores requests that are added at any time.

    Order: `add`, then `await_groups`, with `advance` now and then in between; `abort` ends it.

    engines: those that may sample now; called when an engine has become ready, and while none is sampling.
    """

    def __init__(self, pool: RolloutPool, sampling: SamplingSettings, engines: Callable[[], list[Engine]]) -> None:
        self._pool, self._sampling, self._engines = pool, sampling, engines
        self._stream_id = next(pool.stream_ids)
        self._streams: dict[Any, tuple[Engine, Any]] = {}
        """The engine of each stream, and its actor when the stream was opened."""
        self._requests: dict[int, SampleRequest] = {}
        self._busy_s, self._since = 0.0, pool.group.watch.working_s
        # Sequences that wait for their environment take no place in an engine.
        several = 2 if pool.config.environment.multi_turn else 1
        self._dispatcher = Dispatcher(pool.config.rollout.max_num_seqs * several)
        self._groups: dict[int, Group] = {}
        self._verdicts: dict[int, Sequence[Verdict]] = {}
        self._pending: dict[Any, Submitted] = {}
        self._unscored: set[Any] = set()

    def add(self, requests: Sequence[SampleRequest], *, first: bool = False) -> list[int]:
        """Indices of these requests from now on. first: before those that wait for an engine."""
        observed = self._pool.config.environment.observation_tokens
        limits = [(request.sampling or self._sampling).max_new_tokens + observed for request in requests]
        indices = self._dispatcher.add(
            [r.num_samples * (len(r.prompt_token_ids) + limit) for r, limit in zip(requests, limits, strict=True)],
            [r.num_samples for r in requests],
            first=first,
        )
        self._requests.update(zip(indices, requests, strict=True))
        return indices

    @property
    def resting(self) -> bool:
        """Whether no engine works on a request: all are finished, or no engine is sampling."""
        return self._dispatcher.done or not self._streams

    def advance(self, calls: Sequence[Any] = (), phase: Phase = "updating") -> list[Any]:
        """Give the engines their requests, wait until something is ready and handle it.

        calls: of the learner, to wait for as well; those that are ready. phase: the learner's.
        """
        for stream, (engine, actor) in [*self._streams.items()]:
            if engine.actor is not actor:  # its death was noticed elsewhere
                self._forget(stream)
        if not self._streams:
            self.open_streams()
        assigned = self._dispatcher.assign()
        for engine, _ in self._streams.values():
            if indices := assigned.get(engine.index):
                requests = [(index, self._requests[index]) for index in indices]
                engine.actor.submit.remote(self._stream_id, requests, False)
        self.note_activity()
        starting = {engine.status: engine for engine in self._pool.engines.all if engine.starting}
        ready = self._wait_for_one(calls, starting, phase)
        for item in ready:
            if item in self._streams:
                self._receive(item)
            elif item in starting:
                settled = self._pool.engines.settle(starting[item])
                # Where engines and learner alternate, all engines sleep while a restarted one is synced, so that one
                # has to wait until no other samples.
                if settled and not (self._streams and self._pool.devices.alternate):
                    self.open_streams()
        self._note_verdicts()
        return [call for call in calls if call in ready]

    def open_streams(self) -> None:
        """Open a stream on each engine that may sample and has none."""
        streaming = {engine.index for engine, _ in self._streams.values()}
        for engine in self._engines():
            if engine.index not in streaming:
                stream = engine.actor.stream.remote(self._stream_id, self._sampling, engine.version)
                self._streams[stream] = engine, engine.actor
                engine.stream_id = self._stream_id
                self._dispatcher.add_engine(engine.index)

    def await_groups(self, indices: Sequence[int], *, last: bool = False) -> Collected:
        """Advance until these requests are complete; their groups in this order, once they have verdicts. last: end all
        streams, which then have no request left."""
        watch, engines = self._pool.group.watch, self._pool.engines
        begin = watch.working_s
        while not self._dispatcher.finished.issuperset(indices):
            self.advance()
        if last:
            for engine, actor in self._streams.values():
                if engine.actor is actor:
                    actor.submit.remote(self._stream_id, [], True)
            while self._streams:
                for stream in self._wait_for_one((), {}):
                    self._receive(stream)
        sampled = watch.working_s
        elapsed_s, busy_s = sampled - self._since, self._busy_s / len(engines.all)
        self._since, self._busy_s = sampled, 0.0
        wanted = {*indices}
        calls = {call: item for call, item in self._pending.items() if not wanted.isdisjoint(item.indices)}
        self._verdicts.update(self._pool.verifier.await_verdicts(calls))
        for call in calls:
            del self._pending[call]
        for index in indices:
            del self._requests[index]
        self._note_verdicts()
        for engine in engines.ready:
            engine.restarts = 0  # requests were completed: only restarts after this moment are restarts in a row
        groups = [ScoredGroup(self._groups.pop(index), tuple(self._verdicts.pop(index))) for index in indices]
        return Collected(groups, sampled - begin, watch.working_s - sampled, elapsed_s, busy_s, len(engines.ready))

    def abort(self) -> None:
        """End all streams; their unfinished requests are dropped."""
        for stream, (engine, actor) in [*self._streams.items()]:
            if engine.actor is actor:
                actor.abort.remote(self._stream_id)
            self._forget(stream)

    def note_activity(self) -> None:
        """Record which engines have requests."""
        for engine, _ in self._streams.values():
            self._pool.timeline.enter(engine.name, "sampling" if self._dispatcher.open[engine.index] else None)

    def _wait_for_one(self, calls: Sequence[Any], starting: dict[Any, Engine], phase: Phase = "updating") -> list[Any]:
        """The calls, streams and starting engines that are ready next; none after a stall, when the engines that
        stalled were restarted. phase: of the calls."""
        pending = [stream for stream, (engine, _) in self._streams.items() if self._dispatcher.open[engine.index]]
        idle = not pending and bool(calls or starting)
        if not idle:
            # Not of what waits, or is finished and not collected yet.
            at_work = {index for indices in self._dispatcher.open.values() for index in indices}
            rewards = [r.rewards for index, r in self._requests.items() if not at_work or index in at_work]
            phase = "sampling" if any(rewards) or not rewards else "evaluating"
        elif not calls:
            phase = "setup"
        try:
            ready = self._pool.group.wait_for_one([*calls, *self._streams, *starting], phase)
        except Stalled as error:
            if idle and calls:
                raise  # the learner's
            for stream in [] if idle else pending or [*self._streams]:
                self._forget(stream, error)
            for engine in starting.values() if idle else ():
                self._pool.engines.restart(engine, error)
            ready = []
        self._pool.engines.restart_overdue(ready)
        return ready

    def _receive(self, stream: Any) -> None:
        """Take one item of a stream; a group goes to the verifier by reference."""
        try:
            reference = next(stream)
            item: Sampled = result_of(reference)
        except StopIteration:
            self._forget(stream)
        except ACTOR_LOST as error:
            self._forget(stream, error)
        else:
            self._busy_s += item.busy_s
            if not item.groups:
                return
            engine, _ = self._streams[stream]
            self._groups.update(item.groups)
            indices = [index for index, _ in item.groups]
            for index in indices:
                self._dispatcher.finish(engine.index, index)
            submitted = Submitted(indices, reference, [self._requests[index].rewards for index in indices])
            call = self._pool.verifier.submit(submitted)
            self._pending[call] = submitted
            self._unscored.add(call)
            self._pool.timeline.enter("verifier", "verifying")

    def _forget(self, stream: Any, error: Exception | None = None) -> None:
        """A stream has ended: its engine's unfinished requests wait again. error: restart the engine because of it."""
        engine, actor = self._streams.pop(stream)
        self._dispatcher.remove_engine(engine.index)
        self._pool.timeline.enter(engine.name, None)
        if engine.actor is actor:
            engine.stream_id = None
            if error is not None:
                self._pool.engines.restart(engine, error)

    def _note_verdicts(self) -> None:
        """Record when the verifier has nothing left to do."""
        if self._unscored:
            waiting = [*self._unscored]
            self._unscored -= {*ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]}
            if not self._unscored:
                self._pool.timeline.enter("verifier", None)
