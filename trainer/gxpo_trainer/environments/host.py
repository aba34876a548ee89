"""Runs the episodes of a run, each in a process of its own, for callers in one event loop. Order of a call:

    queued -> its process plays what it has not played yet -> Reply
                  |-> an answer took longer than environment.deadline_s: process killed, failure "timeout"
                  |-> exception or invalid answer: process killed, failure "error"
                  |-> process died: the whole history is played again in a new one; died again: failure "error"

A call has the whole history of its episode. Its process is therefore a cache: it may be killed at any time between two
calls, from outside or because nobody has asked for the episode for long, and the next call plays the history again.

After a death the new process is forked by a worker process of its own. An episode that kills the worker, on which all
episodes depend, thus fails alone: the others were played again once, and their second process has another parent.
The protocols are in `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil

from gxpo_trainer.config.tasks import AGENT, EnvironmentConfig
from gxpo_trainer.environments.contract import (
    MAX_MESSAGE,
    MAX_TEXT,
    Call,
    ChatRequest,
    EnvironmentFailed,
    Observation,
    Problem,
    Reply,
    Turn,
    answer_from_json,
    answer_to_json,
)
from gxpo_trainer.environments.loading import check_allowed
from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.grading.pool import close_output, worker_environment

START_LIMIT_S = 120.0
FORK_LIMIT_S = 30.0
"""A fork takes a millisecond; a worker process that needs so long has been stopped."""
CAUSE_LIMIT_S = 5.0
MAX_LINE = 16 * MAX_TEXT
"""Bytes of an answer: a character takes up to 12 in JSON."""
_TAG = "GXPO_ENVIRONMENT_WORKER"


class EpisodeDied(Exception):
    """The process of an episode, or of the worker that forked it, has ended; the message says how."""


class WorkerFailed(Exception):
    """The worker process did not start; the message has the end of its output."""


class EpisodeProcess:
    """The process of one episode and the socket to it."""

    def __init__(self, worker: WorkerProcess, number: int, stream: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._worker, self.number, self._reader, self._writer = worker, number, stream, writer
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the process ended, once it has."""

    async def ask(self, request: Mapping[str, Any], deadline_s: float) -> Observation | Turn | ChatRequest:
        """The answer to a call.

        Raises TimeoutError after `deadline_s`, EpisodeDied, EnvironmentFailed. After any of them, kill the process.
        """
        async with asyncio.timeout(deadline_s):
            try:
                self._writer.write(json.dumps(request).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
            except ConnectionError:
                line = b""
            except ValueError:
                raise EnvironmentFailed(f"an answer has more than {MAX_LINE:,} bytes") from None
        if not line.endswith(b"\n"):
            cause = "closed its socket"
            with contextlib.suppress(TimeoutError):
                cause = await asyncio.wait_for(asyncio.shield(self.ended), CAUSE_LIMIT_S)
            raise EpisodeDied(cause)
        try:
            fields = json.loads(line)
            if "failure" not in fields:
                return answer_from_json(fields)
            failure = str(fields["failure"])
        except (ValueError, TypeError, KeyError):
            raise EnvironmentFailed("something else than the answer was written to the socket") from None
        raise EnvironmentFailed(failure)

    @property
    def alive(self) -> bool:
        return not self.ended.done() and not self._reader.at_eof()

    def kill(self) -> None:
        """Have the process and its descendants killed, without waiting. A call that waits raises EpisodeDied."""
        self._writer.transport.abort()
        self._worker.kill_episode(self)

    def has_ended(self, cause: str) -> None:
        """Called by the worker. Calls that wait raise EpisodeDied."""
        if not self.started.done():
            self.started.set_exception(EpisodeDied(cause))
            self.started.exception()  # `start_episode` may have given up; then nobody retrieves it
        self.ended.set_result(cause)


class WorkerProcess:
    """A process that forks episodes. Create it with `start`, in the thread that lives as long as it should.

    private: it serves one episode and ends with it.
    """

    def __init__(self, config: EnvironmentConfig, *, private: bool) -> None:
        self._private = private
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_clean_up`
        self._tag = uuid.uuid4().hex
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        module = "gxpo_trainer.environments.worker"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), config.model_dump_json()],
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                env=worker_environment(os.environ) | {_TAG: self._tag},
            )
        self._numbers = itertools.count()
        self._episodes: dict[int, EpisodeProcess] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: EnvironmentConfig, *, private: bool = False) -> WorkerProcess:
        """Raises ConfigError when the class cannot be used, WorkerFailed when the process does not start."""
        worker = cls(config, private=private)
        try:
            await asyncio.wait_for(asyncio.shield(worker._ready), START_LIMIT_S)
        except TimeoutError:
            worker.kill()
            raise WorkerFailed(f"it was not ready within {START_LIMIT_S:g} s") from None
        except asyncio.CancelledError:
            worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can fork episodes."""
        return not self._reading.done()

    async def start_episode(self) -> EpisodeProcess:
        """Fork an episode. Raises EpisodeDied."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
            episode = EpisodeProcess(self, next(self._numbers), reader, writer)
            self._episodes[episode.number] = episode
            message = json.dumps({"start": episode.number}).encode()
            try:
                socket.send_fds(self._control, [message], [theirs.fileno()])
            except OSError:  # it has ended, or is stopped and its socket is full
                self.kill()
        try:
            await asyncio.wait_for(asyncio.shield(episode.started), FORK_LIMIT_S)
        except TimeoutError:
            self.kill()
            raise EpisodeDied("the worker process does not answer") from None
        return episode

    def kill_episode(self, episode: EpisodeProcess) -> None:
        """Have an episode killed, without waiting. A private worker ends with it."""
        if episode.number not in self._episodes:
            return
        try:
            if self._private:
                self._control.shutdown(socket.SHUT_WR)
            else:
                self._control.send(json.dumps({"kill": episode.number}).encode())
        except OSError:
            self.kill()

    async def end(self) -> None:
        """Let the process kill its episodes and their descendants, and wait until it has ended."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        await asyncio.wait([self._reading], timeout=CAUSE_LIMIT_S)
        self.kill()
        await asyncio.wait([self._reading])

    def kill(self) -> None:
        """Kill the process; what it forked is cleaned up as soon as the event loop runs."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    async def _read(self) -> None:
        """Take the worker's messages until it ends."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._control, MAX_MESSAGE):
                self._take(json.loads(data))
        except ConnectionError:
            pass  # reset: the same as its end
        finally:
            self._clean_up()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
        elif "refused" in message:
            self._ready.set_exception(ConfigError(message["refused"]))
        elif "started" in message:
            self._episodes[message["started"]].started.set_result(message["pid"])
        else:
            self._episodes.pop(message["ended"]).has_ended(message["cause"])

    def _clean_up(self) -> None:
        """The worker has ended, or is being killed: nothing that it forked stays."""
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        if self._process.returncode != 0:  # otherwise it has killed all descendants itself
            kill_tagged(self._tag)
        for episode in self._episodes.values():
            episode.has_ended("lost the worker process that forked it")
        self._episodes.clear()
        output = close_output(self._output)
        if not self._ready.done():
            self._ready.set_exception(WorkerFailed(f"last output: {output}"))


def kill_tagged(tag: str) -> None:
    """Kill the processes that were started with this tag in their environment.

    Scans until it finds none twice in a row: one of them may be forking, or executing a program, during a scan.
    """
    clean = 0
    while clean < 2:
        clean += 1
        for process in psutil.process_iter():
            try:
                if process.environ().get(_TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    clean = 0
            except psutil.Error:  # of another user, or ended meanwhile
                continue


MAX_DEATHS = 2
MAX_FAILED_STARTS = 3
IDLE_LIMIT_S = 600.0
"""An episode that nobody asked for in this time has lost its engine, or is played again."""


@dataclass(slots=True, eq=False)
class _Episode:
    """actions: that the process has played; None before the reset. answers: a digest of each answer so far. last: the
    latest answer. asked: when it was last asked for, on the monotonic clock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: EpisodeProcess | None = None
    actions: tuple[str, ...] | None = None
    answers: list[bytes] = field(default_factory=list)
    last: Observation | Turn | ChatRequest | None = None
    asked: float = 0.0
    over: bool = False


class EnvironmentHost:
    """At most `environment.workers` calls run at the same time; the others wait in the order in which they came."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._places = asyncio.Semaphore(config.workers)
        self._starting = asyncio.Lock()
        self._worker: WorkerProcess | None = None
        self._private: list[WorkerProcess] = []
        self._episodes: dict[str, _Episode] = {}

    async def advance(self, call: Call) -> Reply:
        """The environment's answer to a call. Raises ConfigError, TrainingError when no process can be started."""
        episode = self._episodes.setdefault(call.episode, _Episode())
        async with episode.lock, self._places:
            self.free_idle(IDLE_LIMIT_S)
            episode.asked = time.monotonic()
            reply = await self._reply(episode, call)
            if reply.answer is None or getattr(reply.answer, "done", False):
                self.end(call.episode)
            return reply

    def end(self, episode: str) -> None:
        """Kill the process of an episode and forget it; a call that is running fails."""
        ended = self._episodes.pop(episode, None)
        if ended is not None:
            ended.over = True
            _free(ended)

    def free_idle(self, idle_s: float) -> None:
        """Kill the processes of episodes for which nobody has asked for `idle_s`."""
        oldest = time.monotonic() - idle_s
        for name, episode in list(self._episodes.items()):
            if episode.asked <= oldest and not episode.lock.locked():
                self.end(name)

    async def close(self) -> None:
        """End all episodes and processes, and wait for it."""
        for name in list(self._episodes):
            self.end(name)
        workers = [*self._private, *([self._worker] if self._worker else [])]
        await asyncio.gather(*(worker.end() for worker in workers))

    @property
    def pids(self) -> dict[str, int]:
        return {
            name: episode.process.started.result()
            for name, episode in self._episodes.items()
            if episode.process is not None and episode.process.alive
        }

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker is not None and self._worker.alive else None

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
        return Reply(None, "error", f"{cause}, {MAX_DEATHS} times in this call")

    def _method(self, episode: _Episode) -> str:
        """The method that an episode's process is running or was to run; of an agent nobody has written one."""
        if self._config.name == AGENT:
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
            problem = call.problem
            fields = {"id": problem.id, "text": problem.text, "gold": problem.gold, "extra": dict(problem.extra)}
            request = {"problem": fields, "seed": call.seed}
            self._record(episode, await episode.process.ask(request, deadline_s), ())
        while len(episode.actions or ()) < len(call.actions):
            played = call.actions[: len(episode.actions or ()) + 1]
            self._record(episode, await episode.process.ask({"action": played[-1]}, deadline_s), played)
        assert episode.last is not None
        return episode.last

    def _record(self, episode: _Episode, answer: Observation | Turn | ChatRequest, played: tuple[str, ...]) -> None:
        """Raises EnvironmentFailed for another answer than the episode had before its process was lost."""
        digest = hashlib.sha256(json.dumps(answer_to_json(answer)).encode()).digest()
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
            worker = await self._start_worker(private=True)
            self._private = [*(other for other in self._private if other.alive), worker]
        else:
            async with self._starting:
                if self._worker is None or not self._worker.alive:
                    self._worker = await self._start_worker(private=False)
                worker = self._worker
        return await worker.start_episode()

    async def _start_worker(self, *, private: bool) -> WorkerProcess:
        for _ in range(MAX_FAILED_STARTS):
            try:
                return await WorkerProcess.start(self._config, private=private)
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
    check_allowed(config.model_dump(), os.environ)
    try:
        # In a thread of its own: that of a notebook has an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, _first_messages(config, problem, seed)).result()
    except TrainingError as error:
        raise ConfigError(f"environment: {error}") from error


async def _first_messages(config: EnvironmentConfig, problem: Problem, seed: int) -> Observation | ChatRequest:
    """Of an episode; another one and a turn of the policy follow. Raises ConfigError, TrainingError."""
    named = f"environment.name = {config.name!r}"
    host = EnvironmentHost(config)
    try:
        first = await host.advance(Call("first", problem, seed))
        if isinstance(first.answer, ChatRequest):
            return first.answer
        if not isinstance(first.answer, Observation):
            raise ConfigError(f"{named} does not begin an episode of problem {problem.id}: {first.detail}")
        host.end("first")
        again = await host.advance(Call("again", problem, seed))
        if again.answer != first.answer:
            other = again.detail or "other messages"
            raise ConfigError(
                f"{named}: reset of problem {problem.id} with the same seed gave {other} the second time; the same "
                "problem and seed must give the same messages"
            )
        turn = await host.advance(Call("again", problem, seed, ("1",)))
        if turn.failure == "error" and f"{config.name}.step raised" not in turn.detail:
            raise ConfigError(f"{named} violates the contract: {turn.detail}")
        return first.answer
    finally:
        await host.close()
