"""API and scheduler as real processes that can be killed and come back, and the trainers that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx

from gxpo_client.client import is_up
from gxpo_services.local.ray_head import free_port
from gxpo_trainer.runtime.locks import process_start

WAIT_S = 300.0
"""A hang is a failure; nothing here should take a tenth of this."""


SCHEDULER = [str(Path(__file__).with_name("chaos_scheduler.py"))]
"""Words after `python` for a scheduler whose trainers are stand-ins."""
QUICK = {"GXPO_QUOTA_CPUS": "1000", "GXPO_QUOTA_GPUS": "0", "GXPO_TICK_S": "0.2"}
"""Settings of that scheduler: stand-ins take no resources."""


def until(what: Callable[[], object], description: str, each: Callable[[], object] = lambda: None) -> None:
    """Wait for `what`, for at most WAIT_S. each: called before every look."""
    deadline = time.monotonic() + WAIT_S
    while True:
        each()
        if what():
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_S:g} s: {description}")
        time.sleep(0.1)


class ServiceProcesses:
    """Killed by `kill`, and brought back by `check` as a supervisor would."""

    def __init__(self, environment: Mapping[str, str], scheduler: Sequence[str], logs: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._commands = {"api": ["-m", "gxpo_trainer.cli", "serve"], "scheduler": list(scheduler)}
        self._environment = {**os.environ, **environment, "GXPO_PORT": str(self.port)}
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def check(self) -> None:
        """Start what does not run."""
        for name, arguments in self._commands.items():
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                with (self._logs / f"{name}.log").open("ab") as log:
                    self._processes[name] = subprocess.Popen(
                        [sys.executable, *arguments], env=self._environment, stdout=log, stderr=log
                    )

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def is_ready(self) -> bool:
        return is_up(f"{self.url}/health/ready", 5.0)

    def _has_started(self) -> bool:
        assert self._processes["api"].poll() is None, f"the API has ended; see {self._logs / 'api.log'}"
        return self.is_ready()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Started, until the block ends; it begins when the API is ready."""
        try:
            self.check()
            until(self._has_started, "the API to be ready")
            yield self
        finally:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class PatientClient:
    """Asks until the API answers: it may be dead at any moment."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx.Client(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=20, trust_env=False
        )

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        answers: list[httpx.Response] = []

        def responds() -> bool:
            try:
                answers.append(self._client.request(method, path, **arguments))
            except httpx.HTTPError:
                return False
            return answers[-1].status_code < 500

        until(responds, f"{method} {path}")
        return answers[-1]


def trainers(artifacts: Path) -> dict[int, str]:
    """Pid → run of the running trainers, from the lock files of the runs' folders."""
    running = {}
    for lock in sorted(artifacts.glob("*/.lock")):
        words = lock.read_text(encoding="utf-8").split()
        if len(words) == 2 and process_start(int(words[0])) == int(words[1]):
            running[int(words[0])] = lock.parent.name
    return running


def kill_trainer(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself just now
        os.kill(pid, signal.SIGKILL)
