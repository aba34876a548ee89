"""A run's sampling engines: start, restart, which of them are ready, and which samples which request."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.environments.contract import Environments
from gxpo_trainer.errors import Stalled, TrainingError, WeightsUnavailable
from gxpo_trainer.rollout.requests import SamplerSettings
from gxpo_trainer.rollout.sampler import remote_sampler
from gxpo_trainer.runtime.locks import remove_if_abandoned
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import MAX_RESTARTS, Event, TracedProcess, print_stacks

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
        self._environments: Environments | None = None
        self._may_start = True
        """False while the learner uses the GPUs that it shares with the engines."""
        self.all: list[Engine] = []

    def start(self, environments: Environments | None = None) -> None:
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
        except (ray.exceptions.RayActorError, Stalled) as error:
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
                print_stacks(name, engine.process)
        engine.process = None
        if engine.restarts > MAX_RESTARTS:
            raise TrainingError(f"the {name} {what} {engine.restarts} times in a row; see events.jsonl") from error
        # An unreachable actor may still be alive and hold its resources.
        ray.kill(engine.actor, no_restart=True)
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
        """Free the engines' GPUs for the learner; an engine that dies while asleep is restarted by `wake`."""
        self.hold_starts()
        self.results([(engine, engine.actor.sleep.remote(discard_weights)) for engine in self.ready])

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
            except (ray.exceptions.RayActorError, Stalled) as error:
                self.restart(engine, error)
            except WeightsUnavailable as error:
                unavailable = error
        if unavailable is not None:
            raise unavailable
        return results

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
        settings = replace(self._settings, seed=seed_of(key))
        options = self.placement.sampler_options(index)
        actor = remote_sampler().options(**options).remote(settings, self._environments)
        return actor, actor.status.remote(), self.placement.group.watch.running_s


def seed_of(key: str) -> int:
    """A 31-bit seed, a platform-independent hash of the key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1


def _raised(text: str) -> str:
    """The exception in Ray's text of an actor whose constructor failed: what follows the last frame's source lines."""
    lines = text.strip().splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = itertools.dropwhile(lambda line: line.startswith(" "), lines[frames[-1] :] if frames else lines[-1:])
    return " ".join(line.strip() for line in after)


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
        self._open: dict[int, set[int]] = {}
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

    def open_requests(self, engine: int) -> int:
        return len(self._open.get(engine, ()))

    def add_engine(self, engine: int) -> None:
        self._open[engine] = set()

    def remove_engine(self, engine: int) -> None:
        """The engine is lost: its unfinished requests are assigned again, before the others."""
        self._waiting.extendleft(sorted(self._open.pop(engine), reverse=True))

    def assign(self) -> dict[int, list[int]]:
        """Indices of the requests to submit now, by engine."""
        assigned: dict[int, list[int]] = {}
        tokens = {engine: sum(self._tokens[index] for index in open_) for engine, open_ in self._open.items()}
        sequences = {engine: sum(self._sequences[index] for index in open_) for engine, open_ in self._open.items()}
        while self._waiting:
            free = [engine for engine in self._open if sequences[engine] < self._max_sequences]
            if not free:
                break
            engine = min(free, key=lambda candidate: (tokens[candidate], candidate))
            index = self._waiting.popleft()
            self._open[engine].add(index)
            tokens[engine] += self._tokens[index]
            sequences[engine] += self._sequences[index]
            assigned.setdefault(engine, []).append(index)
        return assigned

    def finish(self, engine: int, index: int) -> None:
        """Record a result. Raises KeyError when the request is not open in this engine."""
        self._open[engine].remove(index)
        self.finished.add(index)
