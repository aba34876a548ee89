"""`gxpo serve` as a process with 1,024 descriptors, and clients that hold connections without asking or reading."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_server import received
from support.service_processes import free_port, until

from gxpo_client.client import is_up

DESCRIPTORS = 1024
HEAD_S = 2.0


class Api:
    """The process and an admin's token."""

    def __init__(self, home: Path, *, head_s: float) -> None:
        self.address = ("127.0.0.1", free_port())
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.home = home
        variables = {"GXPO_HOME": str(home), "GXPO_PORT": str(self.address[1]), "GXPO_MAX_HEAD_S": str(head_s)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gxpo_trainer.cli", "serve"],
            env={**os.environ, **variables},
            stdout=(home / "log").open("ab"),
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        until(self.is_up, "the API starts")
        self.headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}

    def is_up(self) -> bool:
        assert self.process.poll() is None, (self.home / "log").read_text()
        return is_up(f"{self.url}/health/ready", 5.0)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=30, trust_env=False)

    def head(self, path: str, *more: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", f"Authorization: {self.headers['Authorization']}", *more]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(sent)
        return connection

    def num_open(self) -> int:
        """Sockets and files of policies; the pool keeps what is open of the database."""
        count = 0
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += "socket:" in str(link.readlink()) or "/policy/" in str(link.readlink())
        return count

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(autouse=True)
def _enough_descriptors() -> Iterator[None]:
    """The clients' side needs more than a thousand itself."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with closing(Api(tmp_path_factory.mktemp("home"), head_s=HEAD_S)) as api:
        yield api


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API whose time-out of heads does not help within a test."""
    with closing(Api(tmp_path_factory.mktemp("home"), head_s=3600.0)) as api:
        yield api


def problem(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)


def responses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_does_not_end_is_answered_and_its_connection_closed(api: Api, sent: bytes) -> None:
    with api.connect(sent) as connection:
        status, body = problem(received(connection))
    assert (status, body["type"]) == (408, "/api/v1/problems#too-slow")
    assert "within 2 s" in body["detail"]
    with api.connect(api.head("/health/live")) as connection:  # that of a second request too
        connection.recv(1 << 16)
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost:")
        assert responses(received(connection)) == [408]


def test_many_requests_are_answered_on_one_connection(api: Api) -> None:
    with httpx.Client(base_url=api.url, headers=api.headers, trust_env=False) as client:
        ports = set()
        for number in range(60):
            path = ("/health/live", "/api/v1/runs", "/api/v1/runs/none", "/metrics")[number % 4]
            with client.stream("GET", path) as answer:
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
                answer.read()
            assert "connection" not in answer.headers, path
            if number % 10 == 0:
                refused = client.post("/api/v1/runs", json={"preset": "none"})
                assert (refused.status_code, "connection" in refused.headers) == (422, False)
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("sent", "status", "detail"),
    [
        (f"GET /api/v1/runs?search={'x' * 70_000} HTTP/1.1\r\n".encode(), 431, "65536 bytes"),
        (b"odd\r\n\r\n", 400, "no valid HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "no valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "no valid HTTP"),
    ],
    ids=["long address", "odd", "no host", "tls"],
)
def test_a_long_head_and_what_is_no_http_are_answered_with_a_problem(
    api: Api, sent: bytes, status: int, detail: str
) -> None:
    with api.connect(sent) as connection:
        answered, body = problem(received(connection))
    assert answered == status
    assert detail in body["detail"]


def test_half_open_connections_keep_nobody_else_out(patient: Api) -> None:
    before = patient.num_open()
    with ExitStack() as held:
        waiting = held.enter_context(patient.connect(patient.head("/api/v1/events/stream")))
        assert b"200 OK" in waiting.recv(1 << 16)
        for number in range(1300):
            held.enter_context(patient.connect((b"", b"GET /api/v1/runs HTTP/1.1\r\n")[number % 2]))
            if number % 100 == 99:
                assert patient.get("/api/v1/runs").status_code == 200, number
        assert patient.num_open() < DESCRIPTORS - 100
        text = patient.get("/metrics").text
        assert f"gxpo_process_max_fds {DESCRIPTORS}.0" in text
        assert 300 < float(re.findall(r"^gxpo_process_open_fds (.+)$", text, re.M)[0]) < DESCRIPTORS - 100
        poll = select.poll()
        poll.register(waiting, select.POLLRDHUP)
        assert poll.poll(0) == [], "a connection with a request under way is not replaced"
    until(lambda: patient.num_open() <= before, "the descriptors are free again")


def test_slow_downloads_have_slots_and_leave_the_service_to_others(patient: Api) -> None:
    sent: Any = {"json": {"preset": "demo"}, "headers": patient.headers}
    run = httpx.post(f"{patient.url}/api/v1/runs", **sent, trust_env=False).json()["id"]
    policy = patient.home / "artifacts" / run / "checkpoints" / "step-00000010"
    (policy / "policy").mkdir(parents=True)
    (policy / "manifest.json").write_text("{}")
    (policy / "state.json").write_text("{}")
    for number in range(8):
        with (policy / "policy" / f"{number}.safetensors").open("wb") as file:
            file.truncate(2**30)
    path = f"/api/v1/runs/{run}/checkpoints/10/download"
    before = patient.num_open()
    with ExitStack() as held:
        slow = [held.enter_context(patient.connect(patient.head(path))) for _ in range(125)]
        statuses = [int(connection.recv(12).split()[1]) for connection in slow]
        assert (statuses.count(200), statuses.count(429)) == (2, 123)
        assert patient.num_open() < before + 200
        assert patient.get("/api/v1/runs").status_code == 200
        assert patient.get(path).json()["detail"].startswith("your token has 2 open downloads")
    until(lambda: patient.num_open() <= before, "files and connections are closed")
    with patient.connect(patient.head(path, "Range: bytes=0-9", "Connection: close")) as connection:
        assert responses(received(connection)) == [206]
