"""One worker process as its pool sees it: start, frames with a deadline, kill. The protocol is in `worker.py`."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
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
        # A stopped worker must not block its pool's thread in a write.
        os.set_blocking(self._stdin.fileno(), False)
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

    def send(self, batch: Sequence[Pair], until: float) -> bool:
        """Write a batch; False when the worker has not taken it by `until` (monotonic clock). Raises WorkerDied."""
        body = json.dumps(batch).encode()
        outgoing = memoryview(_HEADER.pack(len(body)) + body)
        while outgoing:
            if not select.select([], [self._stdin], [], max(0.0, until - time.monotonic()))[1]:
                return False
            try:
                outgoing = outgoing[os.write(self._stdin.fileno(), outgoing[:READ_BYTES]) :]
            except BrokenPipeError as error:
                raise WorkerDied(str(self.pid)) from error
        return True

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next message; None when none has come by `until` (monotonic clock). Raises WorkerDied."""
        while True:
            if len(self._incoming) >= _HEADER.size:
                end = _HEADER.size + _HEADER.unpack_from(self._incoming)[0]
                if len(self._incoming) >= end:
                    message: dict[str, Any] = json.loads(self._incoming[_HEADER.size : end])
                    del self._incoming[:end]
                    return message
            if not select.select([self._stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            data = os.read(self._stdout.fileno(), READ_BYTES)
            if not data:
                raise WorkerDied(str(self.pid))
            self._incoming += data

    def kill(self) -> None:
        """Kill the process; a thread that waits for a message gets WorkerDied. Safe from any thread."""
        self._process.kill()

    def close(self) -> str:
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
