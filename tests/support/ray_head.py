"""The product's Ray head as a process tree that a test starts and ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from gxpo_services.local.ray_head import RayHead as ProductHead
from support.ray_clusters import end_tree


class RayHead:
    """address: of its jobs endpoint. environment: what every process needs that speaks with it."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gxpo-ray-"))
        self._head = ProductHead(self.home)
        self.address, self.environment = self._head.address, dict(self._head.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: list[psutil.Process] = []

    def start(self) -> None:
        """Returns when jobs can be submitted. Raises RuntimeError with its log when that takes too long."""
        child = self._head.child()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (self.home / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                list(child.command), stdout=log, stderr=log, env=environment | dict(child.env), start_new_session=True
            )
        deadline = time.monotonic() + child.start_s
        while not child.ready():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("Ray did not start:\n" + (self.home / "ray.log").read_text()[-3000:])
            time.sleep(0.5)
        self._tree = psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        if self._process is not None:
            end_tree(self._process, self._tree)
        shutil.rmtree(self.home, ignore_errors=True)
