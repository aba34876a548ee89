"""Ray clusters on this machine that a test starts and ends: several nodes, fake GPUs, an autoscaler.

Ray's own helpers end with `ray stop --force`, which kills every Ray of the machine; these end only their processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from gxpo_services.local.ray_head import RayHead as ProductHead, free_port
from gxpo_trainer.config.base import STOP_WAIT_S

OBJECT_STORE_BYTES = 100 * 1024 * 1024
START_ATTEMPTS = 3
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
"""Environment of a driver that joins: Ray would replace 127.0.0.1 by the address of the host."""
_ENV = {**LOOPBACK, "RAY_worker_niceness": "0", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


@contextmanager
def running_head(num_cpus: float, num_gpus: int = 0, autoscaling: dict[str, Any] | None = None) -> Iterator[str]:
    """A head node as a process tree; yields its address.

    autoscaling: resources by worker type, for Ray's autoscaler with its provider `fake_multinode`, which starts the
    nodes as processes of this machine.
    """
    with tempfile.TemporaryDirectory(prefix="gxpo-ray-", ignore_cleanup_errors=True) as folder:
        head, address = _start(Path(folder), num_cpus, num_gpus, autoscaling)
        try:
            yield address
        finally:
            end_tree(head)


def await_nodes(address: str, number: int) -> None:
    """Wait until Ray has this many nodes; the test's own time limit ends a wait in vain."""
    ask = (
        f"import ray, time; ray.init(address={address!r}, log_to_driver=False, logging_level='error')\n"
        f"while len([node for node in ray.nodes() if node['Alive']]) != {number}: time.sleep(1)"
    )
    subprocess.run([sys.executable, "-c", ask], env=os.environ | LOOPBACK, check=True)


def _start(
    folder: Path, num_cpus: float, num_gpus: int, autoscaling: dict[str, Any] | None
) -> tuple[subprocess.Popen[bytes], str]:
    """Ray gives a node 30 s to come up, which a busy machine can miss: try again."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | _ENV
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    log = folder / "head.log"
    for _ in range(START_ATTEMPTS):
        address = f"127.0.0.1:{free_port()}"
        options = {
            "node-ip-address": "127.0.0.1",
            "port": address.rpartition(":")[2],
            "num-cpus": num_cpus,
            "num-gpus": num_gpus,
            "object-store-memory": OBJECT_STORE_BYTES,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": free_port(),
            "include-dashboard": "false",
            "temp-dir": folder,
        }
        if autoscaling is not None:
            config = folder / "autoscaling.json"
            config.write_text(json.dumps(_autoscaling(address, autoscaling)))
            options["autoscaling-config"] = config
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with log.open("wb") as stream:
            head = subprocess.Popen(command, stdout=stream, stderr=stream, env=env, start_new_session=True)
        while head.poll() is None:
            if b"Ray runtime started" in log.read_bytes():
                return head, address
            time.sleep(0.2)
    raise RuntimeError(f"Ray did not start:\n{log.read_text()[-3000:]}")


def _autoscaling(address: str, workers: dict[str, Any]) -> dict[str, Any]:
    """A cluster file as Ray's autoscaler reads it."""
    types = {
        name: {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 4}
        for name, resources in workers.items()
    }
    return {
        "cluster_name": "test",
        "max_workers": 4,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            # The autoscaler finds the idle time of a node by its address, and the provider calls a node's id its
            # address. Without this the two never meet, and no node is ever removed.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": types | {"ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0}},
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{kind}_commands": [] for kind in ("initialization", "setup", "head_setup", "worker_setup")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    }


def end_tree(head: subprocess.Popen[bytes], started: Iterable[psutil.Process] = ()) -> None:
    """End a head node with its processes. started: those known before, which it has left behind if it is dead."""
    tree = set(started)
    if head.poll() is None:
        tree |= set(psutil.Process(head.pid).children(recursive=True))
    head.terminate()
    psutil.wait_procs(tree, timeout=30)
    head.kill()
    head.wait()
    for process in tree:
        if process.is_running():  # psutil knows a process by its start time too
            process.kill()
    psutil.wait_procs(tree, timeout=20)


class RayHead:
    """The product's Ray head as a process tree that a test starts and ends.

    address: of its jobs endpoint. environment: what every process needs that speaks with it.
    """

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gxpo-ray-"))
        self._head = ProductHead(self.home)
        self.address, self.environment = self._head.address, dict(self._head.env)
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: list[psutil.Process] = []

    def start(self) -> None:
        """Returns when jobs can be submitted. Raises RuntimeError with its log when that takes too long."""
        child = self._head.child(STOP_WAIT_S)
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
