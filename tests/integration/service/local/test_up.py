"""`gxpo up` as a process of its own, without Ray: what it starts, keeps alive and ends."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import queued_runs, sockets
from support.processes import is_alive
from support.service_processes import ServiceProcesses, until

from gxpo_client.client import Client, connect, is_up
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.db.database import Database
from gxpo_services.local.ray_head import RayHead, free_port
from gxpo_services.local.supervisor import Child, StartError
from gxpo_services.local.up import Stack
from gxpo_services.scheduling.scheduler import LIVENESS_FILE
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.errors import ConfigError, GxpoError
from gxpo_trainer.reporting.reading import read_metrics

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

    def up(*words: str) -> Up:
        made.append(Up(tmp_path / "home", *words))
        return made[-1]

    yield up
    for one in made:
        if one.process.poll() is None:
            one.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """With Ray and the dashboard."""
    ports = ("--port", str(free_port()), "--dashboard-port", str(free_port()))
    up = Up(tmp_path_factory.mktemp("up") / "home", *ports, whole=True)
    try:
        up.wait_until_up()
        yield up
    finally:
        assert up.end() == 0


def test_it_serves_restarts_what_dies_and_a_killed_one_leaves_nothing(start: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
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

    with pytest.raises(GxpoError, match="is in use by another `gxpo up`"):
        Stack(up.home, print, threading.Event()).__enter__()

    parts = [up.pid("api"), up.pid("scheduler")]
    up.process.kill()
    up.process.wait()
    until(lambda: not any(is_alive(pid) for pid in parts), "the end of its parts")
    second = start("--port", str(free_port()))
    second.wait_until_up()
    assert (second.home / "token").read_text().strip() == token
    everything = [psutil.Process(second.process.pid), *psutil.Process(second.process.pid).children(recursive=True)]
    assert second.end() == 0
    assert [process for process in everything if process.is_running() and is_alive(process.pid)] == []
    assert not (second.home / "up.json").exists()
    assert "resume from their checkpoints at the next `gxpo up`" in second.printed


@pytest.mark.engine
def test_every_socket_of_it_is_known_and_on_loopback(whole: Up) -> None:
    seen = sockets_of(whole)
    assert {"api", "dashboard", "gcs_server", "raylet", "ray-dashboard"} <= {one.process for one in seen}
    sockets.check(seen, sockets.UP)


@pytest.mark.engine
@pytest.mark.long("a training and two starts with Ray; a dead part and a fast end are shown without")
def test_what_hangs_is_replaced_and_a_stop_saves_the_run_that_the_next_start_ends(tmp_path: Path) -> None:
    home, steps, run = tmp_path / "home", 20, ""
    settings = {"budget.steps": steps, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}
    settings |= {"rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 4}
    body = {"preset": "demo", "overrides": [f"{name}={value}" for name, value in settings.items()]}

    def started() -> tuple[Up, Client]:
        up = Up(home, "--port", str(free_port()), "--dashboard-port", str(free_port()), whole=True)
        up.wait_until_up()
        return up, Client(connect(up.state["url"]), (home / "token").read_text().strip(), patience_s=LONG_S)

    up, client = started()
    try:
        hung = {name: up.pid(name) for name in ("api", "scheduler", "dashboard")}
        for pid in hung.values():
            os.kill(pid, signal.SIGSTOP)

        def replaced() -> bool:
            now = {part["name"]: part["pid"] for part in up.state["processes"]}
            return all(now.get(name) not in (None, pid) for name, pid in hung.items())

        up.until(replaced, "the restart of all that hangs")
        run = client.submit(body)["id"]
        up.until(lambda: client.run(run)["progress"]["steps"] >= 2, "two steps")
        seen = sockets_of(up)
        assert {"driver", "ray::SamplerActor", "ray::VerifierActor", "ray::LearnerRank"} <= {x.process for x in seen}
        sockets.check(seen, sockets.JOB)
        assert up.end() == 0
        done = read_metrics(home / "artifacts" / run)[-1]["step"]
        assert 2 <= done < steps
        assert [path.name for path in (home / "artifacts" / run / "checkpoints").iterdir()] == [f"step-{done:08d}"]
        up, client = started()
        up.until(lambda: client.run(run)["state"] == "succeeded", "the end of the run")
        rows = [(row["step"], row["attempt"]) for row in read_metrics(home / "artifacts" / run) if row["step"] > 0]
        assert rows == [(step, 1 + (step > done)) for step in range(1, steps + 1)]
    finally:
        if up.process.poll() is None:
            up.end()


def sockets_of(up: Up) -> list[sockets.Listening]:
    return sockets.listening(up.process.pid, {up.pid(name): name for name in ("api", "dashboard", "scheduler")})


def test_it_serves_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_HOST", "0.0.0.0")
    with pytest.raises(ConfigError, match=r"GXPO_HOST = 0\.0\.0\.0"):
        Stack(tmp_path / "home", print, threading.Event())
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_used_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_RAY_ADDRESS", "http://127.0.0.1:1")
    (tmp_path / "logs").touch()
    with pytest.raises(GxpoError, match=rf"cannot start in {tmp_path}: .*File exists: .*logs"):
        Stack(tmp_path, print, threading.Event()).__enter__()


def test_a_round_of_an_earlier_scheduler_does_not_make_a_new_one_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GXPO_RAY_ADDRESS", "http://127.0.0.1:1")
    (tmp_path / LIVENESS_FILE).touch()

    class Failing(Stack):
        def scheduler(self, env: dict[str, str]) -> Child:
            return replace(super().scheduler(env), command=[sys.executable, "-c", "raise SystemExit(2)"])

    with pytest.raises(StartError, match="scheduler ended with code 2 during start-up"):
        Failing(tmp_path, print, threading.Event(), port=free_port(), dashboard_port=None).__enter__()


# A second account of the same machine: a real one, made for the test, whose processes try to read the first one's
# service.


ACCOUNT = "gxpo-test-"
"""Before the id of the process that makes the account: two suites may run at a time."""

RAY_PATHS = ("/metrics", "/logs", "/api/jobs/", "/api/v0/nodes", "/api/job_agent/jobs/", "/get_or_create_runtime_env")
URLS = ("/api/v1/runs", "/api/v1/tokens", "/metrics", "/api/v1/export?runs=r1")


def opened(paths: Sequence[Path], url: str) -> list[str]:
    """What this process can read: files, folders, and addresses of the service without a token."""
    readable = []
    for path in paths:
        try:
            [*path.iterdir()] if path.is_dir() else path.read_bytes()
        except PermissionError:
            continue
        readable.append(str(path))
    readable += [address for address in URLS if httpx.get(url + address, trust_env=False).status_code != 401]
    return readable


def answering(ports: Sequence[int], headers: Mapping[str, str]) -> list[str]:
    """Addresses of these ports that tell this process something."""
    paths = []
    for port in ports:
        for path in RAY_PATHS:
            with suppress(httpx.TransportError):  # not HTTP
                answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False, timeout=30)
                paths += [path] if answer.status_code == 200 else []
    return paths


def as_account(account: pwd.struct_passwd, look: Callable[[], list[str]]) -> tuple[int, list[str]]:
    """User id and findings of `look` in a process of another account. Its Python may not be readable for that account,
    so the process is forked."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            os.write(writing, json.dumps([os.getuid(), look()]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        uid, findings = json.load(answer)
    os.waitpid(child, 0)
    return uid, findings


@pytest.fixture
def neighbour() -> Iterator[pwd.struct_passwd]:
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("only root can make a second account, with useradd")
    for left in [account.pw_name for account in pwd.getpwall() if account.pw_name.startswith(ACCOUNT)]:
        if not psutil.pid_exists(int(left.removeprefix(ACCOUNT))):  # of a suite that was killed
            subprocess.run(["userdel", left], check=True, capture_output=True)
    name = f"{ACCOUNT}{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, capture_output=True)
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that existed before, open to everybody, in folders that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="gxpo-test-") as folder:
        Path(folder).chmod(0o755)
        made = Path(folder) / "home"
        made.mkdir(mode=0o755)
        yield made


def test_a_second_account_reads_nothing_of_the_service(neighbour: pwd.struct_passwd, home: Path) -> None:
    settings = ServiceSettings(home=home)
    prepare_local(settings)
    ray = RayHead(home)
    with closing(Database(settings.url)) as database:
        run_id = queued_runs.add_run(database)
    folder = settings.artifacts / run_id
    folder.mkdir(parents=True)
    (folder / "service.json").write_text("{}")
    (home / "logs").mkdir()
    idle = ["-c", "import time; time.sleep(600)"]
    with ServiceProcesses({"GXPO_HOME": str(home)}, idle, home / "logs").running() as service:
        files = sorted(path for path in home.rglob("*"))
        names = {str(path.relative_to(home)) for path in files}
        assert {"token", "gxpo.sqlite", "ray-token", f"artifacts/{run_id}/service.json"} <= names
        paths = [home, *files, ray.folder.parent, ray.folder]
        assert len(opened(paths, service.url)) == len(paths), "its owner reads all of it"
        assert as_account(neighbour, lambda: opened(paths, service.url)) == (neighbour.pw_uid, [])


@pytest.mark.engine
def test_a_second_account_learns_nothing_from_any_port_of_ray(whole: Up, neighbour: pwd.struct_passwd) -> None:
    ports = sorted({one.port for one in sockets_of(whole) if one.process not in ("api", "dashboard")})
    token = (whole.home / "ray-token").read_text(encoding="utf-8").strip()
    known = answering(ports, {"Authorization": f"Bearer {token}"})
    assert {"/api/jobs/", "/api/v0/nodes"} <= {*known}, "its owner reads"
    assert as_account(neighbour, lambda: answering(ports, {})) == (neighbour.pw_uid, [])
