"""The listening sockets of a process tree: whose they are, where they listen, and that each is known."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass

import psutil

_RAY_WORKER = "Ray's port of a worker process"
_RAY = {
    "gcs_server": "Ray's control store",
    "raylet": "Ray's node manager and object manager",
    "ray::DashboardAgent": "Ray's agent of the node",
    "ray::RuntimeEnvAgent": "Ray's agent for job environments",
    "ray::IDLE": _RAY_WORKER,
}
RUN = {
    **_RAY,
    "driver": f"{_RAY_WORKER}: the trainer",
    "ray::SamplerActor": f"{_RAY_WORKER}; vLLM's Gloo groups",
    "ray::VerifierActor": _RAY_WORKER,
    "ray::EnvironmentActor": f"{_RAY_WORKER}; the gateway that agents ask for answers",
    "ray::LearnerRank": f"{_RAY_WORKER}; Gloo groups of the ranks; in rank 0 of several the store where they meet",
}
"""Process → what listens in it, in a run of `gxpo train`."""
UP = {**_RAY, "api": "the API", "dashboard": "the dashboard", "ray-dashboard": "Ray's job server"}
"""The same of `gxpo up` without a run."""
JOB = {**UP, **RUN, "ray::JobSupervisor": _RAY_WORKER}
"""The same with runs."""


@dataclass(frozen=True)
class Listening:
    """A TCP socket that listens, or a UDP socket."""

    process: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listening(root: int, names: dict[int, str]) -> list[Listening]:
    """Sockets of the process and its descendants. names: of processes that are not known by their own."""
    found = []
    tree = psutil.Process(root)
    for process in (tree, *tree.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            name, words = names.get(process.pid) or process.name().partition(".")[0], process.cmdline()
            if any(word.endswith("ray/dashboard/dashboard.py") for word in words):
                name = "ray-dashboard"
            elif words[1:4] == ["-m", "gxpo_trainer.cli", "train"]:
                name = "driver"
            found += [
                Listening(name, c.laddr.ip, c.laddr.port)
                for c in process.net_connections("inet")
                if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and c.laddr
            ]
    return found


def check(sockets: list[Listening], known: dict[str, str]) -> None:
    """Every socket is on loopback, and of a process of which its purpose is known."""
    exposed = [one for one in sockets if not one.on_loopback]
    assert not exposed, f"not on loopback: {exposed}"
    unknown = [one for one in sockets if one.process not in known]
    assert not unknown, f"of an unknown process: {unknown}"
