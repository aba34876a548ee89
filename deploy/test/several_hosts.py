"""The files of deploy/ray-cluster, with a second project on this host in the place of a second host."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stack import Cluster, Failed, run

NETWORK = "gxpo-ray"
USER = 10001
FOLDERS = {"artifacts": 0o755, "models": 0o755, "data": 0o755, "ray": 0o700}


@contextmanager
def swarm(cluster: Cluster, log: Callable[[str], None]) -> Iterator[Cluster]:
    """The cluster's files on a network that spans hosts, and the project of the other host; both end with it."""
    if run("docker", "info", "--format", "{{.Swarm.LocalNodeState}}").strip() != "inactive":
        raise Failed("this host is part of a swarm: leave it first, or choose the other parts with --part")
    address = run("hostname", "-I").split()[0]
    with tempfile.TemporaryDirectory(prefix="gxpo-shared-") as folder:
        shared = Path(folder)
        shared.chmod(0o755)
        for name, mode in FOLDERS.items():
            (shared / name).mkdir(mode=mode)
            subprocess.run(["chown", f"{USER}:{USER}", shared / name], check=True)
        cluster.env |= {"SHARED": folder, "COMPOSE_FILE": "docker-compose.yml:deploy/ray-cluster/overlay.yml"}
        other = Cluster(
            cluster.folder, f"{cluster.project}-other", cluster.env | {"COMPOSE_FILE": "deploy/ray-cluster/worker.yml"}
        )
        run("docker", "swarm", "init", "--advertise-addr", address)
        try:
            run("docker", "network", "create", "--driver", "overlay", "--attachable", "--opt", "encrypted", NETWORK)
            log(f"overlay network {NETWORK} on {address}")
            yield other
        finally:
            for project in (other, cluster):
                project.compose("down", "--volumes", check=False)
            run("docker", "network", "rm", NETWORK, check=False)
            run("docker", "swarm", "leave", "--force")


def join(cluster: Cluster, other: Cluster) -> str:
    """Hand Ray's token to the other host and start its worker; what came of it."""
    token = Path(cluster.env["SHARED"]) / "ray" / "token"
    token.write_text(cluster.compose("exec", "-T", "ray-head", "cat", "/secrets/ray/token"), encoding="utf-8")
    token.chmod(0o400)
    subprocess.run(["chown", f"{USER}:{USER}", token], check=True)
    other.compose("up", "-d")
    other.wait_healthy(300)
    return "a worker of another project has joined"
