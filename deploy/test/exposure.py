"""What of the cluster can be reached from outside, as whom it runs, and where its secrets are."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from stack import Cluster, Failed, run, service_of


def isolation(cluster: Cluster, image: str) -> str:
    """From a container on another network: no port of any container answers."""
    targets = []
    for container in cluster.containers():
        if not container["State"]["Running"]:
            continue
        table = run("docker", "exec", container["Id"], "cat", "/proc/net/tcp", "/proc/net/tcp6", check=False)
        rows = [line.split() for line in table.splitlines() if " 0A " in line]
        ports = {int(row[1].rsplit(":", 1)[1], 16) for row in rows}
        for network in container["NetworkSettings"]["Networks"].values():
            targets += [f"{network['IPAddress']}:{port}" for port in ports if network["IPAddress"]]
    code = (
        "import socket, sys\n"
        "for target in sys.argv[1:]:\n"
        "    host, port = target.split(':')\n"
        "    probe = socket.socket(); probe.settimeout(0.3)\n"
        "    if probe.connect_ex((host, int(port))) == 0: print(target)\n"
    )
    run("docker", "network", "create", f"{cluster.project}-outside")
    try:
        reached = run(
            "docker", "run", "--rm", "--network", f"{cluster.project}-outside", image, "python", "-c", code, *targets
        )
    finally:
        run("docker", "network", "rm", f"{cluster.project}-outside")
    if reached.strip():
        raise Failed(f"reached from another network: {reached.split()}")
    return f"from a container on another network: none of {len(targets)} listening ports answers"


def users(cluster: Cluster) -> str:
    """Every process is a user without rights, in a container that cannot get any."""
    for container in cluster.containers():
        if container["State"]["Running"]:
            rows = run("docker", "top", container["Id"], "-eo", "pid,uid").splitlines()[1:]
            found = {row.split()[1] for row in rows}
            if found != {"10001"}:
                raise Failed(f"{service_of(container)} runs as {found}")
        wanted = {
            "User": container["Config"]["User"] == "10001:10001",
            "CapDrop": container["HostConfig"]["CapDrop"] == ["ALL"],
            "ReadonlyRootfs": container["HostConfig"]["ReadonlyRootfs"],
            "no-new-privileges": "no-new-privileges:true" in (container["HostConfig"]["SecurityOpt"] or []),
        }
        if not all(wanted.values()):
            raise Failed(f"{service_of(container)}: {wanted}")
    return "every process of every container has uid 10001; root read-only, no capability, no new privileges"


def secrets(cluster: Cluster, tag: str) -> str:
    """The three secrets are in no image, inspection or log; images of `tag` are read layer by layer."""
    values = [
        cluster.once("migrate", "cat", "/secrets/admin/token"),
        cluster.once("migrate", "cat", "/secrets/database/password"),
        cluster.compose("exec", "-T", "ray-head", "cat", "/secrets/ray/token"),
    ]
    own_secrets = [value.strip().encode() for value in values]
    if len(set(own_secrets)) != 3 or min(map(len, own_secrets)) < 32:
        raise Failed("the secrets are not three long ones")
    said = json.dumps(cluster.containers()).encode()
    images = sorted({container["Image"] for container in cluster.containers()})
    said += run("docker", "inspect", *images).encode()
    for image in images:
        said += run("docker", "history", "--no-trunc", image).encode()
    said += cluster.compose("logs", "--no-color").encode()
    if any(secret in said for secret in own_secrets):
        raise Failed("a secret is in docker inspect, docker history or a log")
    small = ("init-secrets", "postgres", "migrate", "api", "scheduler", "dashboard")
    own = [f"gxpo/{name}:{tag}" for name in small]
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "images.tar"
        run("docker", "save", "-o", str(saved), *own)
        size = saved.stat().st_size
        if any(found_in(saved, secret) for secret in own_secrets):
            raise Failed("a secret is in an image layer")
    return (
        f"3 secrets: in no inspect, history or log of {len(images)} images, and in none of the {size >> 20} MB of "
        f"layers of {', '.join(small)}"
    )


def found_in(file: Path, secret: bytes) -> bool:
    """Whether a file holds these bytes, also across the borders of what is read at once."""
    with file.open("rb") as stream:
        tail = b""
        while part := stream.read(1 << 24):
            if secret in tail + part:
                return True
            tail = part[-len(secret) :]
    return False
