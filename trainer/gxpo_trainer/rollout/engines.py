"""A run's sampling engines: start, restart, which of them are ready, and their sync to the learner's weights."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.errors import LearnerDied, Stalled, TrainingError, WeightsUnavailable
from gxpo_trainer.rollout.environments import EnvironmentHandle
from gxpo_trainer.rollout.sampler import SamplerSettings, remote_sampler
from gxpo_trainer.runtime.deaths import ACTOR_LOST
from gxpo_trainer.runtime.locks import remove_if_abandoned
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import MAX_RESTARTS, Event, TracedProcess, end_stalled
from gxpo_trainer.weights.buckets import SyncReport, WeightBucket

KILL_S = 10.0
"""Longest wait for a killed process to end."""


@dataclass(slots=True)
class Engine:
    """One engine. actor: None while it is lost and may not start. status: a reference while the actor starts. begun:
    when it started, by the watch's `running_s`. folder: of its temporary files. stream_id: of its open stream."""

    index: int
    actor: Any
    status: Any
    begun: float
    process: TracedProcess | None = None
    folder: Path | None = None
    version: int | None = None
    restarts: int = 0
    starts: int = 1
    stream_id: int | None = None

    @property
    def name(self) -> str:
        """Its process in timelines."""
        return f"engine {self.index}"

    @property
    def node(self) -> str:
        """Ray's id of its node; empty until it was ready once."""
        return self.process.node if self.process is not None else ""

    def between_steps(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the actor, which runs it between two decoding steps while a stream is open."""
        if self.stream_id is None:
            return method.remote(*arguments)
        return method.options(concurrency_group="weights").remote(*arguments, stream_id=self.stream_id)

    @property
    def ready(self) -> bool:
        return self.actor is not None and self.status is None

    @property
    def starting(self) -> bool:
        return self.status is not None


class WeightSource(Protocol):
    """Publishes the learner's weights bucket by bucket; `LearnerGroup` is one."""

    @property
    def sender(self) -> Any:
        """The rank that sends broadcasts; another object after a restart."""

    def next_bucket(self, version: int, index: int, nodes: Sequence[str]) -> tuple[WeightBucket, float | None]:
        """Pack bucket `index` for engines on these Ray nodes. After the last one also the fraction of weights that
        changed since the version before. Index 0 starts a version, also when the one before was not finished."""

    def send(self, bucket: WeightBucket) -> Any:
        """Start to send a bucket that the engines receive by a collective; None for other transports."""

    def open_broadcast(self, num_workers: int) -> tuple[str, int, Any] | None:
        """Address, port and pending call of a new broadcast group; None for transports without one."""


class Engines:
    """Starts N engines and restarts those that die, while the others continue.

    attempt: of the run, for new seeds. initial_version: version of the weights in the model folder; None before a sync.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        model_folder: str,
        log_event: Event,
        *,
        attempt: int = 1,
        initial_version: int | None = None,
    ) -> None:
        self.placement, self.log_event = placement, log_event
        self._config, self._attempt = config, attempt
        self._settings = SamplerSettings(
            config,
            model_folder,
            placement.device,
            placement.sampler_threads,
            colocated=placement.colocated,
            initial_version=initial_version,
        )
        self._environments: EnvironmentHandle | None = None
        self._may_start = True
        """False while the learner uses the GPUs that it shares with the engines."""
        self.all: list[Engine] = []
        self._members: list[Any] = []
        """The broadcast group's sender and engine actors; empty without a group."""

    def start(self, environments: EnvironmentHandle | None = None) -> None:
        """Start all engines without waiting for them. environments: what answers the policy between its turns."""
        self._environments = environments
        self.all = [Engine(index, *self._new_actor(index, 1)) for index in range(self._config.placement.samplers)]

    @property
    def ready(self) -> list[Engine]:
        return [engine for engine in self.all if engine.ready]

    def await_ready(self, *, every: bool) -> None:
        """Wait until an engine is ready, or every one. Raises TrainingError when an engine cannot start."""
        while waiting := {engine.status: engine for engine in self.all if engine.starting}:
            enough = not every and bool(self.ready)
            try:
                group = self.placement.group
                ready = ray.wait([*waiting], timeout=0)[0] if enough else group.wait_for_one([*waiting], "setup")
            except Stalled as error:
                for engine in waiting.values():
                    self.restart(engine, error)
                continue
            for status in ready:
                self.settle(waiting[status])
            if enough and not ready:
                return

    def settle(self, engine: Engine) -> bool:
        """Take the answer of an engine that was starting; False when it died and is starting again."""
        try:
            status = self.placement.group.get(engine.status, "setup")
        except (*ACTOR_LOST, Stalled) as error:
            self.restart(engine, error)
            return False
        engine.status, engine.version = None, status["version"]
        engine.process, engine.folder = status["process"], status["folder"]
        return True

    def restart(self, engine: Engine, error: Exception) -> None:
        """Replace the actor of an engine that died or stalled, without waiting. Raises TrainingError after MAX_RESTARTS
        in a row, and at the second attempt when an engine that was never ready cannot be built: the first may fail for
        what passes, such as GPU memory that is not free yet."""
        name = "sampler" if len(self.all) == 1 else f"sampler {engine.index}"
        cause = str(error).strip().splitlines()[0]
        if getattr(error, "actor_init_failed", False):  # an exception, not a kill
            cause = _raised(str(error))
            if engine.folder is None and engine.restarts:
                raise TrainingError(f"the {name} cannot start: {cause}") from error
        engine.restarts += 1
        what = "stalled" if isinstance(error, Stalled) else "died"
        self.log_event("sampler_restarted", f"the {name} {what} ({cause}) and was restarted", sampler=engine.index)
        if isinstance(error, Stalled):
            with self.placement.group.watch.excluded():
                end_stalled({name: (engine.actor, engine.process)})
        engine.process = None
        if engine.restarts > MAX_RESTARTS:
            raise TrainingError(f"the {name} {what} {engine.restarts} times in a row; see events.jsonl") from error
        # An unreachable actor may still be alive and hold its resources.
        ray.kill(engine.actor, no_restart=True)
        if self._environments is not None:
            self._environments.end_all(_name(engine.index, engine.starts))
        engine.actor = engine.status = engine.version = engine.stream_id = None
        if self._may_start:
            self._start_again(engine)

    def restart_overdue(self, ready: Sequence[Any]) -> None:
        """Restart engines whose start takes too long, which the progress of others would hide. ready: calls and streams
        that have just been answered."""
        for engine in self.all:
            if engine.starting and engine.status not in ready:
                try:
                    self.placement.group.watch.check_since(engine.begun, "setup")
                except Stalled as error:
                    self.restart(engine, error)

    def hold_starts(self) -> None:
        """Wait for engines that are starting; those that die from now on are restarted by `allow_starts`."""
        self.await_ready(every=True)
        self._may_start = False

    def allow_starts(self) -> None:
        """Start the engines that died since `hold_starts`."""
        self._may_start = True
        for engine in self.all:
            if engine.actor is None:
                self._start_again(engine)

    def sleep(self, *, discard_weights: bool) -> None:
        """Free the engines' GPUs for the learner; an engine that dies while asleep is restarted by `wake`.

        Engines without their weights hold no version, so that the next sync is of all of them.
        """
        self.hold_starts()
        self.results([(engine, engine.actor.sleep.remote(discard_weights)) for engine in self.ready])
        if discard_weights:
            for engine in self.all:
                engine.version = None

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Give the engines their memory back. With the KV cache all GPUs are theirs: lost engines start."""
        self.results([(engine, engine.actor.wake.remote(what)) for engine in self.ready])
        if what == "kv_cache":
            self.allow_starts()

    def results(self, calls: Sequence[tuple[Engine, Any]], phase: Phase = "syncing") -> list[Any]:
        """Results of actor calls; an engine that died or stalled meanwhile is restarted and has none.

        Raises WeightsUnavailable, but only after all calls, so that every death is known by then.
        """
        results, unavailable = [], None
        for engine, call in calls:
            try:
                results.append(self.placement.group.get(call, phase))
            except (*ACTOR_LOST, Stalled) as error:
                self.restart(engine, error)
            except WeightsUnavailable as error:
                unavailable = error
        if unavailable is not None:
            raise unavailable
        return results

    def sync(self, source: WeightSource, version: int, engines: Sequence[Engine]) -> SyncReport | None:
        """Bring these engines to `version` and verify them; the slowest one's report, None when all of them died.

        They load a bucket while the next one is packed. A death does not stop the others, except in a broadcast, which
        fails for all: the version is then sent again to the engines that are left, in a new group. Raises
        WeightSyncMismatch, and LearnerDied when the published weights are unavailable.
        """
        for engine in engines:
            engine.version = None
        left = list(engines)
        while left:
            try:
                synced = self._send(source, version, left)
            except WeightsUnavailable as error:
                self._members = []
                if all(engine.ready for engine in left):
                    raise LearnerDied(f"its published weights are unavailable ({error})") from error
                left = [engine for engine in left if engine.ready]
                continue
            for engine in left:
                if engine.ready:
                    engine.version = version
            return synced
        return None

    def _send(self, source: WeightSource, version: int, engines: Sequence[Engine]) -> SyncReport | None:
        """Send all buckets. Raises WeightsUnavailable when a broadcast has lost a member."""
        nodes = [engine.node for engine in engines]
        self._join_broadcast(source, engines)
        loading: list[tuple[Engine, Any]] = []
        sending = None
        for index in itertools.count():
            bucket, changed = source.next_bucket(version, index, nodes)
            self._finish(loading, sending)
            self._check_members(engines)
            loading = [(e, e.between_steps(e.actor.receive, bucket)) for e in engines if e.ready]
            if not loading:
                break
            sending = source.send(bucket)
            if bucket.last:
                break
        reports: list[SyncReport] = self._finish(loading, sending) if loading else []
        slowest = max(reports, key=lambda report: report.load_s + report.verify_s, default=None)
        return None if slowest is None else replace(slowest, changed_fraction=changed)

    def _finish(self, calls: list[tuple[Engine, Any]], sending: Any) -> list[Any]:
        """Results of the engines that are left, once the source has sent its bucket. Raises WeightsUnavailable."""
        results = self.results(calls)
        if sending is not None:
            try:
                self.placement.group.get(sending, "syncing")
            except (*ACTOR_LOST, Stalled) as error:
                raise LearnerDied(str(error).strip().splitlines()[0]) from error
        return results

    def _check_members(self, engines: Sequence[Engine]) -> None:
        """Raise WeightsUnavailable before a broadcast that a dead member would block."""
        if self._members and not all(engine.ready for engine in engines):
            raise WeightsUnavailable("an engine of the weight broadcast group died")

    def _join_broadcast(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        """Form a new broadcast group whenever its members change. Raises WeightsUnavailable when one died."""
        members = [source.sender, *(engine.actor for engine in engines)]
        if members == self._members:
            return
        size = self._config.placement.tensor_parallel
        workers = len(engines) * size
        opened = source.open_broadcast(workers)
        if opened is None:
            return
        address, port, pending = opened
        self._members = members
        calls = [
            (engine, engine.between_steps(engine.actor.join_broadcast, address, port, 1 + place * size, 1 + workers))
            for place, engine in enumerate(engines)
        ]
        self._finish(calls, pending)
        self._check_members(engines)

    def _start_again(self, engine: Engine) -> None:
        if len(self.all) == 1 or engine.restarts > 1:
            self.placement.group.back_off(engine.restarts)
        engine.starts += 1
        engine.actor, engine.status, engine.begun = self._new_actor(engine.index, engine.starts)

    def kill(self) -> None:
        """Kill all engines and remove what they leave on this host; on others the next engine there does."""
        for engine in self.all:
            if engine.actor is not None:
                ray.kill(engine.actor, no_restart=True)
        for engine in self.all:
            if engine.folder is not None:
                remove_if_abandoned(engine.folder, wait_s=KILL_S)
        self.all = []

    def _new_actor(self, index: int, start: int) -> tuple[Any, Any, float]:
        # A new seed for each start: the same one would repeat the first responses of the run.
        key = f"{self._config.seed}/{self._attempt}/{start}" + (f"/{index}" if index else "")
        settings = replace(self._settings, seed=seed_of(key), name=_name(index, start))
        options = self.placement.sampler_options(index)
        actor = remote_sampler().options(**options).remote(settings, self._environments)
        return actor, actor.status.remote(), self.placement.group.watch.running_s


def _name(index: int, start: int) -> str:
    """Prefix of the names of the episodes of one start of an engine, for example `0.1/`."""
    return f"{index}.{start}/"


def seed_of(key: str) -> int:
    """A 31-bit seed, a platform-independent hash of the key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1


def _raised(text: str) -> str:
    """The exception in Ray's text of an actor whose constructor failed: what follows the last frame's source lines."""
    lines = text.strip().splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = itertools.dropwhile(lambda line: line.startswith(" "), lines[frames[-1] :] if frames else lines[-1:])
    return " ".join(line.strip() for line in after)
