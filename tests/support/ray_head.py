"""The product's Ray head as a process tree that a test can stop, kill and restart."""

from __future__ import annotations

import os
import shutil
import signal
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

    def ports(self) -> list[int]:
        """TCP ports on which its processes listen, once all of them have started."""
        log = self._head.folder / "session_latest" / "logs" / "monitor.log"
        deadline = time.monotonic() + 120
        while not log.exists() or "Monitor: Started" not in log.read_text():
            if time.monotonic() > deadline:
                raise RuntimeError("Ray's monitor did not start")
            time.sleep(0.5)
        assert self._process is not None
        tree = psutil.Process(self._process.pid).children(recursive=True)
        sockets = (connection for process in tree for connection in process.net_connections("tcp"))
        return sorted({socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN})

    def kill(self) -> None:
        """kill -9 of everything that belongs to the head, as a power cut would."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        self._end(signal.SIGTERM)
        shutil.rmtree(self.home, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        end_tree(self._process, self._tree, number)
        self._process, self._tree = None, []
