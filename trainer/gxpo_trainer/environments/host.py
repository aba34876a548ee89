"""Runs the episodes of a run, each in a process of its own, for callers in one event loop. Order of a call:

    queued -> its process plays what it has not played yet -> Reply
                  |-> an answer took longer than environment.deadline_s: process killed, failure "timeout"
                  |-> exception, invalid answer, or an agent that ended by itself: process killed, failure "error"
                  |-> process died: the whole history is played again in a new one; died again: failure "error"

A call has the whole history of its episode. Its process is therefore a cache: it may be killed at any time between two
calls, from outside or because the episode was not called for long, and the next call plays the history again.

After a death the new process is forked by a worker process of its own. An episode that kills the worker, on which all
episodes depend, thus fails alone: the others were played again once, and their second process has another parent.
The protocols are in `worker.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gxpo_trainer.config.tasks import AgentConfig, EnvironmentConfig
from gxpo_trainer.environments.contract import Call, ChatRequest, EnvironmentFailed, Observation, Problem, Reply, Turn
from gxpo_trainer.environments.loading import check_allowed
from gxpo_trainer.environments.processes import EpisodeDied, EpisodeProcess, WorkerFailed, WorkerProcess
from gxpo_trainer.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from gxpo_trainer.environments.gateway import Gateway

MAX_DEATHS = 2
MAX_FAILED_STARTS = 3


@dataclass(slots=True, eq=False)
class _Episode:
    """actions: that the process has played; None before the reset. answers: a digest of each answer so far. last: the
    latest answer. answered: when it gave it, on the monotonic clock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: EpisodeProcess | None = None
    actions: tuple[str, ...] | None = None
    answers: list[bytes] = field(default_factory=list)
    last: Observation | Turn | ChatRequest | None = None
    answered: float = 0.0
    over: bool = False


class EnvironmentHost:
    """At most `environment.workers` calls run at the same time; the others wait in the order in which they came. Its
    processes end with the thread of the event loop. idle_s: an episode that is not called for this time after an answer
    has lost its engine."""

    def __init__(self, config: EnvironmentConfig, idle_s: float = math.inf) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an episode has two sockets, an agent connections
        self._config, self._idle_s = config, idle_s
        self._gateway: Gateway | None = None
        self._places = asyncio.Semaphore(config.workers)
        self._starting = asyncio.Lock()
        self._worker: WorkerProcess | None = None
        self._private: list[WorkerProcess] = []
        self._episodes: dict[str, _Episode] = {}

    async def advance(self, call: Call) -> Reply:
        """The environment's answer to a call. Raises ConfigError, TrainingError when no process can be started."""
        episode = self._episodes.setdefault(call.episode, _Episode())
        async with episode.lock, self._places:
            self.free_idle(self._idle_s)
            reply = await self._reply(episode, call)
            episode.answered = time.monotonic()
            if reply.answer is None or getattr(reply.answer, "done", False):
                self.end(call.episode)
            return reply

    def end(self, episode: str) -> None:
        """Kill the process of an episode and forget it; a call that is running fails."""
        ended = self._episodes.pop(episode, None)
        if ended is not None:
            ended.over = True
            _free(ended)

    def end_all(self, prefix: str = "") -> None:
        """End the episodes whose names have this prefix."""
        for name in [name for name in self._episodes if name.startswith(prefix)]:
            self.end(name)

    def free_idle(self, idle_s: float) -> None:
        """Kill the processes of episodes that were not called for `idle_s`. A later call plays the episode again, and
        must get the same answers."""
        oldest = time.monotonic() - idle_s
        for episode in self._episodes.values():
            if episode.answered <= oldest and not episode.lock.locked():
                _free(episode)

    async def aclose(self) -> None:
        """End all episodes and processes, and wait for it."""
        self.end_all()
        workers = [*self._private, *([self._worker] if self._worker else [])]
        await asyncio.gather(*(worker.end() for worker in workers))
        if self._gateway is not None:
            await self._gateway.close()

    def pids(self) -> dict[str, int]:
        """Of the episodes, by name."""
        processes = {name: episode.process for name, episode in self._episodes.items()}
        return {name: process.pid for name, process in processes.items() if process and not process.ended.done()}

    async def _reply(self, episode: _Episode, call: Call) -> Reply:
        cause = ""
        for deaths in range(MAX_DEATHS):
            if episode.over:
                return Reply(None, "error", "the episode was ended during this call")
            try:
                return Reply(await self._play(episode, call, private=deaths > 0))
            except TimeoutError:
                limit = f"environment.deadline_s = {self._config.deadline_s:g} s"
                return Reply(None, "timeout", f"{self._method(episode)} did not return within {limit}")
            except EnvironmentFailed as error:
                return Reply(None, "error", str(error))
            except EpisodeDied as error:
                cause = f"{self._method(episode)}: the process {error}"
                _free(episode)
            except OSError as error:  # the machine has no process or file left
                cause = f"{self._method(episode)}: the process cannot be started: {error}"
                _free(episode)
        return Reply(None, "error", f"{cause}, {MAX_DEATHS} times in this call")

    def _method(self, episode: _Episode) -> str:
        """The method that an episode's process is running or was to run; of an agent nobody has written one."""
        if isinstance(self._config, AgentConfig):
            return "the agent"
        return f"{self._config.name}.{'reset' if episode.actions is None else 'step'}"

    async def _play(self, episode: _Episode, call: Call, *, private: bool) -> Observation | Turn | ChatRequest:
        """Play the part of the history that the process has not played; the last answer."""
        played = episode.actions
        alive = episode.process is not None and episode.process.alive
        if not alive or (played is not None and played != call.actions[: len(played)]):
            _free(episode)
            episode.process = await self._start_episode(private=private)
            if episode.over:
                raise EpisodeDied("was no longer needed")
        assert episode.process is not None
        deadline_s = self._config.deadline_s
        if episode.actions is None:
            request = {"problem": asdict(call.problem), "seed": call.seed}
            self._record(episode, await episode.process.ask(request, deadline_s), ())
        while len(episode.actions or ()) < len(call.actions):
            played = call.actions[: len(episode.actions or ()) + 1]
            self._record(episode, await episode.process.ask({"action": played[-1]}, deadline_s), played)
        assert episode.last is not None
        return episode.last

    def _record(self, episode: _Episode, answer: Observation | Turn | ChatRequest, played: tuple[str, ...]) -> None:
        """Raises EnvironmentFailed for another answer than the episode had before its process was lost."""
        digest = hashlib.sha256(repr(answer).encode()).digest()
        number = len(played)
        if number == len(episode.answers):
            episode.answers.append(digest)
        elif episode.answers[number] != digest:
            raise EnvironmentFailed(
                f"{self._method(episode)} gave another answer when the episode was played again after its process was "
                "lost; the same problem, seed and actions must give the same answers"
            )
        episode.actions, episode.last = played, answer

    async def _start_episode(self, *, private: bool) -> EpisodeProcess:
        if private:
            worker = await self._start_worker()
            self._private = [*(other for other in self._private if other.alive), worker]
        else:
            async with self._starting:
                if self._worker is None or not self._worker.alive:
                    self._worker = await self._start_worker()
                worker = self._worker
        create: Callable[..., EpisodeProcess] = EpisodeProcess
        if isinstance(self._config, AgentConfig):
            from gxpo_trainer.environments.gateway import AgentProcess, Gateway  # runs without agents need no server

            self._gateway = self._gateway or Gateway(self._config.host)
            create = partial(AgentProcess, self._gateway)
        try:
            process = await worker.start_episode(create)
        except BaseException:
            if private:
                worker.finish()
            raise
        if private:
            process.ended.add_done_callback(lambda _: worker.finish())
        return process

    async def _start_worker(self) -> WorkerProcess:
        for _ in range(MAX_FAILED_STARTS):
            try:
                return await WorkerProcess.start(self._config)
            except WorkerFailed as error:
                failure = error
        raise TrainingError(
            f"the process of environment {self._config.name} cannot be started ({MAX_FAILED_STARTS} attempts in a "
            f"row); is environment.memory_mb = {self._config.memory_mb} enough? {failure}",
            reason="setup_failed",
        )


def _free(episode: _Episode) -> None:
    """Kill the process; what was played is unknown to the next one."""
    if episode.process is not None:
        episode.process.kill()
    episode.process = episode.actions = episode.last = None


def check_environment(config: EnvironmentConfig, problem: Problem, seed: int) -> Observation | ChatRequest | None:
    """Begin an episode of this problem, in a process of its own as in the run. Returns its first messages, None for a
    single turn; of an agent its first request.

    A second episode and one turn of the policy follow, because only a call shows whether `reset` gives a group the same
    messages and what `step` returns; not for an agent, which need not repeat itself. An exception or a time-out of
    `step` refuses no run: the text is not the policy's.

    Raises ConfigError when the class or address is not allowed, the class cannot be imported or violates the contract,
    or the episode does not begin.
    """
    if not config.multi_turn:
        return None
    check_allowed(config.model_dump())
    try:
        # In a thread of its own: that of a notebook has an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, _first_messages(config, problem, seed)).result()
    except TrainingError as error:
        raise ConfigError(f"environment: {error}") from error


async def _first_messages(config: EnvironmentConfig, problem: Problem, seed: int) -> Observation | ChatRequest:
    """Raises ConfigError, TrainingError."""
    named = f"environment.name = {config.name!r}"
    async with aclosing(EnvironmentHost(config)) as host:
        first = await host.advance(Call("first", problem, seed))
        if isinstance(first.answer, ChatRequest):
            return first.answer
        if not isinstance(first.answer, Observation):
            raise ConfigError(f"{named} does not begin an episode of problem {problem.id}: {first.detail}")
        host.end("first")
        again = await host.advance(Call("again", problem, seed))
        if again.answer != first.answer:
            raise ConfigError(
                f"{named}: reset of problem {problem.id} with the same seed gave {again.detail or 'other messages'} "
                "the second time; the same problem and seed must give the same messages"
            )
        turn = await host.advance(Call("again", problem, seed, ("1",)))
        if turn.failure == "error" and f"{config.name}.step raised" not in turn.detail:
            raise ConfigError(f"{named} violates the contract: {turn.detail}")
        return first.answer
