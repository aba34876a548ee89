"""`gxpo up` in a process of its own, and a client of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from gxpo_client.client import Client, Json, connect
from gxpo_client.errors import ServiceError
from gxpo_services.cli.common import STATE_FILE

HANG_S = 3600.0


class UpProcess:
    """home: of the service; created. settings: environment variables of the service."""

    def __init__(self, home: Path, settings: Mapping[str, str]) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "gxpo_trainer.cli", "up", "--home", str(home), "--no-dashboard"]
        self._process = subprocess.Popen(command, env={**os.environ, **settings})
        self.until(self._is_up, "gxpo up")
        url = json.loads((home / STATE_FILE).read_text(encoding="utf-8"))["url"]
        self.client = Client(connect(url), (home / "token").read_text(encoding="utf-8").strip(), patience_s=300.0)

    def runs(self) -> list[Json]:
        """All runs; none while the API is unavailable. Raises RuntimeError when `gxpo up` has ended."""
        self._check()
        try:
            return self.client.all_of("/runs")
        except ServiceError as error:
            print(f"the API is unavailable: {error}", flush=True)
            return []

    def children(self) -> dict[str, psutil.Process]:
        """Running child processes by name."""
        marks = {"serve": "api", "scheduler": "scheduler", "start": "ray"}
        running = {}
        for process in psutil.Process(self._process.pid).children():
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            for word, name in marks.items():
                if word in words:
                    running[name] = process
        return running

    def until(self, condition: Callable[[], bool], description: str, *, hang_s: float = HANG_S) -> None:
        deadline = time.monotonic() + hang_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {hang_s:g} s for {description}; {self.home} has the logs")
            time.sleep(0.5)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=120)

    def _is_up(self) -> bool:
        self._check()
        return "scheduler" in self.children() and (self.home / "token").exists()

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"gxpo up ended with code {self._process.returncode}")
