"""One worker process as its pool sees it: start, non-blocking frames, kill. The protocol is in `worker.py`."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import gxpo_trainer

Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""Gold and response; with a third entry, JSON-able: `options` (VerifyOptions.to_dict) and `context` (rewards)."""

_HEADER = struct.Struct(">I")
READ_BYTES = 1 << 16


class WorkerDied(Exception):
    """The worker's end of a pipe is closed."""


class WorkerProcess:
    """A verifier process and its two pipes.

    Must be created by the thread that lives as long as the worker should: the worker asks the kernel to be killed
    when its parent thread ends. rewards: (name, weight) of the components that it can score; empty: none.
    """

    def __init__(self, memory_mb: int, rewards: Sequence[tuple[str, float]] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `kill`
        module = "gxpo_trainer.rewards.worker" if rewards else "gxpo_trainer.verify.worker"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", module, str(memory_mb), str(os.getpid())),
                *([json.dumps(list(rewards))] if rewards else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_worker_environment(os.environ),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time that the process has used so far, seconds; 0 when it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    @property
    def read_fd(self) -> int:
        return self._stdout.fileno()

    @property
    def write_fd(self) -> int:
        return self._stdin.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes remain that did not fit into the worker's input pipe."""
        return bool(self._outgoing)

    def send(self, batch: Sequence[Pair]) -> None:
        """Queue a batch and write what fits. Raises WorkerDied."""
        body = json.dumps(batch).encode()
        self._outgoing += _HEADER.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Write queued bytes until the pipe is full. Raises WorkerDied."""
        while self._outgoing:
            try:
                written = os.write(self.write_fd, self._outgoing[:READ_BYTES])
            except BlockingIOError:
                return
            except BrokenPipeError as error:
                raise WorkerDied(str(self.pid)) from error
            del self._outgoing[:written]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """All complete messages that have arrived, and whether the worker's output is still open."""
        is_open = True
        while True:
            try:
                data = os.read(self.read_fd, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                is_open = False
                break
            self._incoming += data
            if len(data) < READ_BYTES:
                break
        return self._complete_messages(), is_open

    def _complete_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        start = 0
        while len(self._incoming) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming, start)
            end = start + _HEADER.size + length
            if len(self._incoming) < end:
                break
            messages.append(json.loads(self._incoming[start + _HEADER.size : end]))
            start = end
        del self._incoming[:start]
        return messages

    def kill(self) -> str:
        """Kill and reap the process, close the pipes; returns the end of what it wrote to standard error."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2_000))
        tail = self._errors.read().decode(errors="replace")
        self._errors.close()
        return tail


def _worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread per worker, a fixed hash seed (sympy orders by hashes), and this package on the path."""
    package_root = str(Path(gxpo_trainer.__file__).resolve().parents[1])
    inherited = environment.get("PYTHONPATH", "")
    return {
        **environment,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": package_root + (os.pathsep + inherited if inherited else ""),
    }
