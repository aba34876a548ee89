"""Docker and the REST service as the cluster's test uses them: standard library only, so that it runs anywhere."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PUBLIC_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "gxpo-base:bookworm"
ANSWER_S = 20.0
FIRST_PORT = 18651


class Failed(Exception):
    """A check that the cluster did not pass."""


def run(*words: str, check: bool = True, quiet: bool = False, **options: Any) -> str:
    """Standard output of a command. Raises Failed with the end of its output, or after `timeout`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"`{' '.join(words[:6])}`: not within {error.timeout:g} s") from error
    if check and done.returncode:
        output = "" if quiet else f": {(done.stdout + done.stderr)[-3000:]}"
        raise Failed(f"`{' '.join(words[:6])}` ended with {done.returncode}{output}")
    return done.stdout


def until(what: str, look: Callable[[], Any], limit_s: float, pause_s: float = 1.0) -> Any:
    """The first true answer of `look`. Raises Failed when there was none within the limit."""
    end = time.monotonic() + limit_s
    while True:
        if found := look():
            return found
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {limit_s:.0f} s")
        time.sleep(pause_s)


class Cluster:
    """One compose project in `folder`. env: variables of the compose file."""

    def __init__(self, folder: Path, project: str, env: dict[str, str]) -> None:
        self.folder, self.project = folder, project
        self.env = {**os.environ, **env}
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        self.command = ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]

    def compose(self, *words: str, check: bool = True, timeout: float | None = None) -> str:
        words = (*self.command, "-p", self.project, *words)
        return run(*words, check=check, cwd=self.folder, env=self.env, timeout=timeout)

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        """What `docker inspect` reports of the project's containers, or of those of one service."""
        labels = [f"label=com.docker.compose.project={self.project}", "label=com.docker.compose.oneoff=False"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        words = [word for label in labels for word in ("--filter", label)]
        ids = run("docker", "ps", "--all", "--quiet", *words).split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids)) if ids else []
        return sorted(found, key=lambda container: str(container["Name"]))

    def unhealthy(self) -> list[str]:
        """Services that are to stay up and are not healthy."""
        return [
            f"{service_of(container)} is {health(container)}"
            for container in self.containers()
            if container["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped" and health(container) != "healthy"
        ]

    def wait_healthy(self, limit_s: float) -> None:
        until("all services healthy", lambda: self.containers() and not self.unhealthy(), limit_s)

    def once(self, service: str, *words: str) -> str:
        """Output of a command in a new container of a service, with its volumes."""
        return self.compose("run", "--rm", "--no-deps", "-T", service, *words)


def service_of(container: dict[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def health(container: dict[str, Any]) -> str:
    state = container["State"]
    return str(state["Health"]["Status"] if state["Running"] and "Health" in state else state["Status"])


class Service:
    """The REST service from outside, with a token."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Raises Failed for an error answer, OSError when nothing answers."""
        return json.loads(self.read(method, path, body))

    def read(self, method: str, path: str, body: Any = None) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        data = None
        if body is not None:
            request.add_header("Content-Type", "application/json")
            data = json.dumps(body).encode()
        try:
            with direct().open(request, data, ANSWER_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise Failed(f"{method} {path}: {error.code} {error.read()[:1000]!r}") from error

    def submit(self, config: dict[str, Any]) -> str:
        return str(self.ask("POST", "/api/v1/runs", {"config": config})["id"])

    def run(self, run_id: str) -> dict[str, Any] | None:
        """The run, None while the service is away."""
        try:
            return dict(self.ask("GET", f"/api/v1/runs/{run_id}"))
        except (OSError, Failed):
            return None


def direct() -> urllib.request.OpenerDirector:
    """Without a proxy of the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def base_image(log: Callable[[str], None]) -> str:
    """The public base image where it can be pulled, else a Debian 12 made here by debootstrap."""
    for name in (PUBLIC_BASE, LOCAL_BASE):
        if run("docker", "images", "--quiet", name).strip():
            return name
    if subprocess.run(["docker", "pull", "--quiet", PUBLIC_BASE], capture_output=True, check=False).returncode == 0:
        return PUBLIC_BASE
    log(f"{PUBLIC_BASE} cannot be pulled here: making {LOCAL_BASE} with debootstrap")
    if shutil.which("debootstrap") is None:
        raise Failed("install debootstrap, or load an image and name it in BASE_IMAGE")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", "bookworm", str(root))
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        source = root / "etc/apt/sources.list"
        mirror = source.read_text().split()[1]
        source.write_text(
            f"deb {mirror} bookworm main\ndeb {mirror} bookworm-updates main\n"
            f"deb {mirror}-security bookworm-security main\n"
        )
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
            run("docker", "import", "-", LOCAL_BASE, stdin=packed.stdout)
    return LOCAL_BASE


def pip_settings() -> tuple[dict[str, str], list[http.server.ThreadingHTTPServer]]:
    """pip's settings of this machine as build arguments. Indexes in folders are served on loopback for the build."""
    env = {"BUILD_NETWORK": "host"}
    servers = []
    for name in ("index-url", "extra-index-url", "find-links", "trusted-host"):
        reported = [
            run("python3", "-m", "pip", "config", "get", f"{part}.{name}", check=False) for part in (":env:", "global")
        ]
        words = next((value.split() for value in reported if value.strip()), [])
        found = []
        for word in words:
            path = Path(urlsplit(word).path) if word.startswith(("file://", "/")) else None
            if path is None:
                found.append(word)
                continue
            # An index refers to sibling files: its parent is served.
            root, rest = (path.parent, f"{path.name}/") if name != "find-links" else (path, "")
            handler = partial(QuietHandler, directory=str(root))
            # The same port each time, as the builder keeps its layers by the arguments.
            server = http.server.ThreadingHTTPServer(("127.0.0.1", FIRST_PORT + len(servers)), handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            found.append(f"http://127.0.0.1:{server.server_port}/{rest}")
        if found:
            env[f"PIP_{name.replace('-', '_').upper()}"] = " ".join(found)
    return env, servers


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        return


def clone(source: Path, target: Path, *, tree: bool) -> None:
    """A clean clone of the last commit, or (tree) of what lies in the working tree and git does not ignore."""
    if not tree:
        run("git", "clone", "--quiet", "--no-hardlinks", str(source), str(target))
    else:
        listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=source).split("\0")
        for name in filter(None, listed):
            if (source / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, target / name)
    for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        shutil.copy(certificate, target / "deploy/ca")


def listening(ports: Sequence[int]) -> set[int]:
    """Of these ports of 127.0.0.1, those that accept a connection."""
    found = set()
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.add(port)
    return found
