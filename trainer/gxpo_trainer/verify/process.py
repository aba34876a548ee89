"""One worker process as its pool sees it: start, messages with a deadline, kill. The protocol is in `worker.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from gxpo_trainer.verify.worker_limits import worker_environment

Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""Gold and response; a third entry, JSON-able, has `options` (VerifyOptions.to_dict), `context` (rewards), `status`."""

READ_BYTES = 1 << 16


class WorkerDied(Exception):
    """The worker's end of the socket is closed."""


class WorkerProcess:
    """A verifier process and the socket to it.

    Must be created by the thread that lives as long as the worker should: the worker asks the kernel to be killed
    when its parent thread ends. rewards: (name, weight) of the components that it can score; empty: none.
    """

    def __init__(self, memory_mb: int, rewards: Sequence[tuple[str, float]] = ()) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._socket, theirs = socket.socketpair()
        module = "gxpo_trainer.rewards.worker" if rewards else "gxpo_trainer.verify.worker"
        command = [sys.executable, "-m", module, str(memory_mb), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command + ([json.dumps(list(rewards))] if rewards else []),
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                env=worker_environment(os.environ),
            )
        self._incoming = bytearray()
        self._reported_cpu_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time that the process has used since its last message, seconds; 0 when it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system) - self._reported_cpu_s

    def ask(self, pair: Pair, until: float) -> dict[str, Any] | None:
        """Send a pair; the first message about it, as in `receive`."""
        try:
            self._socket.settimeout(max(1e-3, until - time.monotonic()))
            self._socket.sendall(json.dumps(pair).encode() + b"\n")
        except TimeoutError:
            return None
        except OSError as error:
            raise WorkerDied(str(self.pid)) from error
        return self.receive(until)

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next message; None when none has come by `until` (monotonic clock). Raises WorkerDied."""
        while (end := self._incoming.find(b"\n")) < 0:
            try:
                self._socket.settimeout(max(1e-3, until - time.monotonic()))
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            if not data:
                raise WorkerDied(str(self.pid))
            self._incoming += data
        message: dict[str, Any] = json.loads(self._incoming[:end])
        del self._incoming[: end + 1]
        self._reported_cpu_s = message.pop("cpu", self._reported_cpu_s)
        return message

    def kill(self) -> None:
        """Kill the process; a thread that waits for a message gets WorkerDied. Safe from any thread."""
        self._process.kill()

    def close(self) -> str:
        """Kill and reap the process; returns the end of its output."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2_000))
            return output.read().decode(errors="replace")
