"""A second account of the same machine: a real one, made for the test, whose processes try to read the first one's
service."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support import queued_runs, ray_head
from support.service_processes import ServiceProcesses, until

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.db.database import Database
from gxpo_services.local.ray_head import RayHead
from gxpo_services.settings import ServiceSettings

ACCOUNT = "gxpo-neighbour"

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
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", ACCOUNT], check=True, capture_output=True)
    try:
        yield pwd.getpwnam(ACCOUNT)
    finally:
        subprocess.run(["userdel", ACCOUNT], check=True, capture_output=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that existed before, open to everybody, in folders that everybody can enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
        if folder.parent == Path("/tmp"):
            break
    made = tmp_path / "home"
    made.mkdir(mode=0o755)
    return made


def test_a_second_account_reads_nothing_of_the_service(neighbour: pwd.struct_passwd, home: Path) -> None:
    settings = ServiceSettings(home=home)
    prepare_local(settings)
    ray = RayHead(home)
    database = Database(settings.url)
    run_id = queued_runs.add_run(database)
    database.close()
    folder = settings.artifacts / run_id
    folder.mkdir(parents=True)
    (folder / "service.json").write_text("{}")
    (home / "logs").mkdir()
    service = ServiceProcesses({"GXPO_HOME": str(home)}, ["-c", "import time; time.sleep(600)"], home / "logs")
    try:
        service.check()
        until(service.is_ready, "the API to be ready")
        files = sorted(path for path in home.rglob("*"))
        names = {str(path.relative_to(home)) for path in files}
        assert {"token", "gxpo.sqlite", "ray-token", f"artifacts/{run_id}/service.json"} <= names
        paths = [home, *files, ray.folder.parent, ray.folder]
        assert len(opened(paths, service.url)) == len(paths), "its owner reads all of it"
        assert as_account(neighbour, lambda: opened(paths, service.url)) == (neighbour.pw_uid, [])
    finally:
        service.close()


@pytest.mark.engine
def test_a_second_account_learns_nothing_from_any_port_of_ray(neighbour: pwd.struct_passwd) -> None:
    head = ray_head.RayHead()
    try:
        head.start()
        ports = head.ports()
        token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
        known = answering(ports, {"Authorization": f"Bearer {token}"})
        assert {"/api/jobs/", "/api/v0/nodes"} <= {*known}, "its owner reads"
        assert as_account(neighbour, lambda: answering(ports, {})) == (neighbour.pw_uid, [])
    finally:
        head.close()
