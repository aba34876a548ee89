"""Which addresses are this machine's own, which can be asked, and that proxies are left out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recording_server import RecordingServer, Request

from gxpo_client.client import Client, connect
from gxpo_client.connection import is_http, is_loopback, is_up
from gxpo_client.errors import NotFound
from gxpo_services.cli.common import connect as command_line_client
from gxpo_services.scheduling.launcher import JobStatus, RayLauncher
from gxpo_services.settings import read_settings
from gxpo_trainer.errors import ConfigError


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.8.9.1", "http://localhost:1", "https://[::1]:8"])
def test_loopback(url: str) -> None:
    assert is_http(url)
    assert is_loopback(url)


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1", "http://127.0.0.1.example", "http://localhost.example", "http://h"]
)
def test_elsewhere(url: str) -> None:
    assert is_http(url)
    assert not is_loopback(url)


@pytest.mark.parametrize("url", ["", "auto", "127.0.0.1:8265", "ray://h:1", "http://", "http://h:x", "http://h:70000"])
def test_what_cannot_be_asked(url: str) -> None:
    assert not is_http(url)
    if url:
        with pytest.raises(ConfigError, match="must look like http"):
            command_line_client(url)
    for name in ("ray_address", "public_url"):
        with pytest.raises(ConfigError, match=rf"GXPO_{name.upper()}: .*must look like http://host:port"):
            read_settings(**{name: url})


Servers = tuple[RecordingServer, RecordingServer]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """A service on loopback, and the proxy that the environment names; both only know that they are ready."""

    def respond(request: Request) -> int:
        return 200 if request.path.endswith("/health/ready") else 404

    with RecordingServer(respond) as service, RecordingServer(respond) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield service, proxy


def paths(server: RecordingServer) -> list[str]:
    return [request.path for request in server.requests]


def ask_all(url: str) -> None:
    """The scheduler of Ray and of the API, and the command line of the service."""
    assert RayLauncher(url).status("j1") == JobStatus("unknown")
    assert is_up(f"{url}/health/ready", 2.0)
    with Client(connect(url), None) as client, pytest.raises(NotFound):
        client.run("r1")


PATHS = ["/api/jobs/j1", "/health/ready", "/api/v1/runs/r1"]


def test_loopback_is_asked_itself_whatever_proxy_there_is(servers: Servers) -> None:
    service, proxy = servers
    ask_all(service.url)
    assert (paths(service), paths(proxy)) == (PATHS, [])


def test_other_machines_are_asked_through_the_proxy(servers: Servers) -> None:
    service, proxy = servers
    ask_all("http://gxpo.invalid:8000")
    assert (paths(service), paths(proxy)) == ([], [f"http://gxpo.invalid:8000{path}" for path in PATHS])


def test_a_token_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_TOKEN", "other")
    with pytest.raises(ConfigError, match="check --token-file"):
        command_line_client("http://127.0.0.1:8000", tmp_path / "nothing")
