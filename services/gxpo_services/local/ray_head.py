"""A Ray head for one machine: on loopback at free ports, with token authentication, its files in the home."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx

from gxpo_services.local.supervisor import Child
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import replace_file
from gxpo_trainer.planner.devices import usable_cores

OBJECT_STORE_BYTES = 512 * 1024 * 1024
TOKEN_FILE = "ray-token"
_INNER = "r"
_LONGEST_FOLDER = 40
"""Ray's socket paths add 64 characters; the kernel limit is 107."""
_TRIES = 50


def free_port(wanted: int | None = None) -> int:
    """`wanted` or the next free port after it; any free port without `wanted`.

    Raises ConfigError when the next ports are all taken.
    """
    if wanted is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    for port in range(wanted, min(wanted + _TRIES, 65536)):
        with socket.socket() as probe, suppress(OSError):
            # As servers do, to reuse a port in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no free port from {wanted} on; choose another with --port or --dashboard-port")


class RayHead:
    """Address and start command of a home's Ray. Its job server executes code for every holder of its token.

    env: of processes that connect to this Ray. The token itself stays in its file.
    """

    def __init__(self, home: Path) -> None:
        self.folder = _folder(home)
        token_file = home / TOKEN_FILE
        if not token_file.exists():
            replace_file(token_file, secrets.token_hex(32), 0o600)
        self._token = token_file.read_text(encoding="utf-8").strip()
        # Ray prefers a token in the environment, such as one of another cluster, unless it is empty.
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        # Not Ray's default 8265: two heads that start at once would both find it free.
        self._gcs_port, self._dashboard_port = free_port(), free_port()
        self.address = f"http://127.0.0.1:{self._dashboard_port}"

    def child(self, stop_wait_s: int) -> Child:
        """The head as a foreground process that stops its own children, trainers first.

        stop_wait_s: time that they have for a checkpoint.
        """
        for session in self.folder.glob("session_*"):  # logs and sockets of earlier heads of this home
            if session.is_symlink():
                session.unlink()
            else:
                shutil.rmtree(session, ignore_errors=True)
        options = {
            "node-ip-address": "127.0.0.1",
            "port": self._gcs_port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self._dashboard_port,
            # 0: any free port. One chosen before may be taken at a restart, and Ray would go on without accepting jobs;
            # the default range of workers would collide with another Ray.
            "dashboard-agent-listen-port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": usable_cores(),
            "object-store-memory": OBJECT_STORE_BYTES,
            "temp-dir": self.folder,
            "include-log-monitor": False,
        }
        command = [sys.executable, "-m", "gxpo_services.local.ray_start", "start", "--head", "--block"]
        command += ["--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())]
        env = {
            **self.env,
            # By default Ray runs workers at nice 15, where other processes starve them.
            "RAY_worker_niceness": "0",
            # Otherwise the first trainer waits for idle workers, without end if one takes more than 60 s to start.
            "RAY_prestart_worker_first_driver": "0",
            # Without this, Ray replaces 127.0.0.1 by the host's external address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # The trainers have ended before (ray_start.py), and nothing else is worth the wait for an idle node.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "GXPO_STOP_WAIT_S": str(stop_wait_s),
            # Ray's metrics servers require no token and name actors and jobs. Two of them cannot be switched off: with
            # an invalid port Ray logs an error and does not start them.
            "RAY_enable_metrics_collection": "0",
            "DASHBOARD_METRIC_PORT": "-1",
            "AUTOSCALER_METRIC_PORT": "-1",
        }
        # Restarting a head ends its runs, so one that is only slow is left alone for minutes.
        return Child("ray", command, self._ready, env, stop_s=stop_wait_s + 30.0, tries=3, probes=30)

    def _ready(self) -> bool:
        """Whether the job server responds and a node is alive."""
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            response = httpx.get(f"{self.address}/api/v0/nodes", headers=headers, timeout=5.0, trust_env=False)
            return response.status_code == 200 and response.json()["data"]["result"]["total"] > 0
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return False


def _folder(home: Path) -> Path:
    """Ray's folder: in `home`, or in the temporary folder if that path is too long for sockets, or not ASCII, which no
    driver of Ray can use.

    Ray makes its folder world-writable, so it is placed in a folder with mode 0700.
    """
    outer = home / "ray"
    if len(str(outer / _INNER)) > _LONGEST_FOLDER or not str(outer).isascii():
        mark = hashlib.sha256(str(home).encode()).hexdigest()[:8]
        outer = Path(tempfile.gettempdir()) / f"gxpo-ray-{os.geteuid()}-{mark}"
    outer.mkdir(mode=0o700, exist_ok=True)
    status = outer.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{outer} is not a private folder (mode 700); remove it, or choose a shorter --home")
    inner = outer / _INNER
    inner.mkdir(exist_ok=True)
    return inner
