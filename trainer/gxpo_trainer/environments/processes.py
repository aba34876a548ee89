"""The process of an episode, and the worker process that forks it, as their host sees them.

The protocols are in `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.environments.contract import (
    MAX_MESSAGE,
    MAX_TEXT,
    ChatRequest,
    EnvironmentFailed,
    Observation,
    Turn,
    answer_from_json,
)
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.pool import close_output, worker_environment

START_LIMIT_S = 120.0
FORK_LIMIT_S = 30.0
"""A fork takes a millisecond; a worker process that needs so long has been stopped."""
CAUSE_LIMIT_S = 5.0
MAX_LINE = 16 * MAX_TEXT
"""Bytes of an answer: a character takes up to 12 in JSON."""
LOST = "lost the worker process that forked it"
"""Cause of the end of a process: not its own."""
_TAG = "GXPO_ENVIRONMENT_WORKER"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EpisodeDied(Exception):
    """The process of an episode, or of the worker that forked it, has ended; the message says how."""


class WorkerFailed(Exception):
    """The worker process did not start; the message has the end of its output."""


class EpisodeProcess:
    """The process of one episode and the socket to it. life: the socket on which the worker tells how the process
    ended; when it is closed, the worker kills the process. Create it with `start_episode`."""

    def __init__(self, pid: int, life: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self._life, self._reader, self._writer = pid, life, reader, writer
        self.ended = asyncio.create_task(self._wait())
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
            raise EnvironmentFailed("unexpected data on the environment's socket") from None
        raise EnvironmentFailed(failure)

    @property
    def alive(self) -> bool:
        return not self.ended.done() and not self._reader.at_eof()

    def kill(self) -> None:
        """Have the process and its descendants killed, without waiting. A call that waits raises EpisodeDied."""
        self._writer.transport.abort()
        self._life[1].transport.abort()

    async def _wait(self) -> str:
        with contextlib.suppress(ConnectionError):
            if cause := await self._life[0].read():
                return cause.decode()
        return LOST


class WorkerProcess:
    """A process that forks episodes. Create it with `start`, in the thread that lives as long as it should."""

    def __init__(self, config: EnvironmentConfig) -> None:
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
        self.pid = self._process.pid
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: EnvironmentConfig) -> WorkerProcess:
        """Raises ConfigError when the class cannot be used, WorkerFailed when the process does not start."""
        worker = cls(config)
        try:
            await asyncio.wait_for(asyncio.shield(worker._ready), START_LIMIT_S)
        except TimeoutError:
            worker.kill()
            raise WorkerFailed(f"it was not ready within {START_LIMIT_S:g} s") from None
        return worker

    @property
    def alive(self) -> bool:
        """Whether it can fork episodes."""
        return not self._reading.done()

    async def start_episode(self, create: Callable[..., EpisodeProcess]) -> EpisodeProcess:
        """Fork an episode. create: its class. Raises EpisodeDied."""
        (ours, theirs), (life, workers) = socket.socketpair(), socket.socketpair()
        with theirs, workers:
            stream = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
            life_stream = await asyncio.open_connection(sock=life)
            try:
                socket.send_fds(self._control, [b"start"], [theirs.fileno(), workers.fileno()])
            except OSError:  # it has ended, or is stopped and its socket is full
                self.kill()
        try:
            began = await asyncio.wait_for(life_stream[0].readline(), FORK_LIMIT_S)
        except (TimeoutError, ConnectionError):
            began = b""
            self.kill()
        if not began.endswith(b"\n"):
            stream[1].transport.abort()
            life_stream[1].transport.abort()
            raise EpisodeDied(began.decode() or "was not started: the worker process does not answer")
        return create(int(began), life_stream, *stream)

    async def end(self) -> None:
        """Let the process kill its episodes and their descendants, and wait until it has ended."""
        self.finish()
        await asyncio.wait([self._reading], timeout=CAUSE_LIMIT_S)
        self.kill()
        await asyncio.wait([self._reading])

    def finish(self) -> None:
        """Let the process kill its episodes and their descendants, and end."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process; what it forked is cleaned up as soon as the event loop runs."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    async def _read(self) -> None:
        """Take the worker's only message, and wait until it ends."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._control, MAX_MESSAGE):
                message = json.loads(data)
                if "refused" in message:
                    self._ready.set_exception(ConfigError(message["refused"]))
                else:
                    self._ready.set_result(None)
        except ConnectionError:
            pass  # reset: the same as its end
        finally:
            self._clean_up()

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
