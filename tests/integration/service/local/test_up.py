"""`gxpo up` as a process of its own, without Ray: what it starts, keeps alive and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import sockets
from support.processes import is_alive
from support.service_processes import until

from gxpo_client.connection import is_up
from gxpo_services.local.ray_head import free_port

LONG_S = 120


class Up:
    """A running `gxpo up`. Unless it is `whole`, it has no dashboard, and GXPO_RAY_ADDRESS names an external Ray, so
    none is started."""

    def __init__(self, home: Path, *words: str, whole: bool = False) -> None:
        self.home = home
        self._log = home.with_name(f"{home.name}.log").open("w+")
        command = [sys.executable, "-m", "gxpo_trainer.cli", "up", "--home", str(home), *words]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("GXPO_", "RAY_"))}
        env["GXPO_TICK_S"] = "0.2"
        if not whole:
            command.append("--no-dashboard")
            env["GXPO_RAY_ADDRESS"] = f"http://127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, text=True, env=env)

    @property
    def printed(self) -> str:
        return Path(self._log.name).read_text()

    def until(self, condition: Callable[[], object], description: str) -> None:
        def check() -> None:
            assert self.process.poll() is None, "gxpo up ended"

        until(condition, description, check)

    def wait_until_up(self) -> None:
        self.until(lambda: "Press Ctrl-C to stop." in self.printed, "the start")

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.home / "up.json").read_text())
        return state

    def pid(self, name: str) -> int:
        return next(int(part["pid"]) for part in self.state["processes"] if part["name"] == name)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LONG_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    made: list[Up] = []

    def up(*words: str, whole: bool = False) -> Up:
        made.append(Up(tmp_path / "home", *words, whole=whole))
        return made[-1]

    yield up
    for one in made:
        if one.process.poll() is None:
            one.end()


def test_it_serves_restarts_what_dies_and_ends_whole(start: Callable[..., Up], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        up = start("--port", str(port))
        up.wait_until_up()
    url = up.state["url"]
    assert f"api: port {port} is in use; using" in up.printed
    assert url != f"http://127.0.0.1:{port}"
    token = (up.home / "token").read_text().strip()
    answer = httpx.get(f"{url}/api/v1/runs", headers={"Authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()["items"]) == (200, [])
    assert token not in up.printed

    api = up.pid("api")
    os.kill(api, signal.SIGKILL)
    up.until(lambda: up.pid("api") != api, "the restart of the API")
    up.until(lambda: is_up(f"{url}/health/ready", 5.0), "the API")
    assert "api: ended with signal 9; restarting in 1 s" in up.printed

    second = Up(up.home)
    assert second.process.wait(LONG_S) == 1
    assert f"is in use by `gxpo up` (process {up.process.pid})" in second.printed

    everything = [psutil.Process(up.process.pid), *psutil.Process(up.process.pid).children(recursive=True)]
    assert up.end() == 0
    assert [process for process in everything if process.is_running() and is_alive(process.pid)] == []
    assert not (up.home / "up.json").exists()
    assert "resume from their checkpoints at the next `gxpo up`" in up.printed


def test_a_killed_one_leaves_nothing_that_keeps_the_next_from_starting(start: Callable[..., Up]) -> None:
    first = start("--port", str(free_port()))
    first.wait_until_up()
    parts = [first.pid("api"), first.pid("scheduler")]
    token = (first.home / "token").read_text()
    first.process.kill()
    first.process.wait()
    until(lambda: not any(is_alive(pid) for pid in parts), "the end of its parts")
    second = start("--port", str(free_port()))
    second.wait_until_up()
    assert (second.home / "token").read_text() == token
    assert second.end() == 0


@pytest.mark.engine
def test_every_socket_of_it_is_known_and_on_loopback(start: Callable[..., Up]) -> None:
    up = start("--port", str(free_port()), "--dashboard-port", str(free_port()), whole=True)
    up.wait_until_up()
    seen = sockets.listening(up.process.pid, {up.pid(name): name for name in ("api", "dashboard", "scheduler")})
    assert {"api", "dashboard", "gcs_server", "raylet", "ray-dashboard"} <= {one.process for one in seen}
    sockets.check(seen, sockets.UP)
    assert up.end() == 0


def test_a_setting_that_cannot_be_used_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gxpo_trainer.cli", "up", "--home", str(tmp_path / "home")]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"GXPO_HOST": "0.0.0.0"}, check=False
    )
    assert ended.returncode == 2
    assert "GXPO_HOST = 0.0.0.0" in ended.stderr
    assert not (tmp_path / "home").exists()
