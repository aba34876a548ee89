"""The processes of episodes as their host sees them: start, calls with a deadline, kill. The protocols are in
`worker.py` and `episode.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from typing import Any

import psutil

from gxpo_trainer.config.environment import EnvironmentConfig
from gxpo_trainer.environments.base import Observation, Turn
from gxpo_trainer.environments.contract import MAX_TEXT, EnvironmentFailed, answer_from_json
from gxpo_trainer.environments.worker import MAX_MESSAGE
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.verify.worker_limits import worker_environment

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

    @property
    def pid(self) -> int:
        return self.started.result()

    async def ask(self, request: Mapping[str, Any], deadline_s: float) -> Observation | Turn:
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
            raise EpisodeDied(await self._cause())
        try:
            fields = json.loads(line)
            if "failure" not in fields:
                return answer_from_json(fields)
            failure = str(fields["failure"])
        except (ValueError, TypeError, KeyError):
            raise EnvironmentFailed("something else than the answer was written to the socket") from None
        raise EnvironmentFailed(failure)

    async def _cause(self) -> str:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.ended), CAUSE_LIMIT_S)
        return "closed its socket"

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
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2_000))
            text = output.read().decode(errors="replace").strip()
        if not self._ready.done():
            self._ready.set_exception(WorkerFailed(f"last output: {text or '(none)'}"))


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
