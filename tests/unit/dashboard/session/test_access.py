"""The local token is used only for visitors on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gxpo_client.connection import is_loopback_host
from gxpo_dashboard.session.visitor import (
    Visit,
    cookie_name,
    has_secret,
    host_of,
    may_use_local_token,
    read_local_token,
)

SERVICE = "http://127.0.0.1:8000"
HEADERS = frozenset({"host", "user-agent", "cookie"})


def visit(
    server: str | None = "127.0.0.1", ip: str | None = None, host: str | None = "localhost:8501", **more: str
) -> Visit:
    return Visit.of(server, ip, host, [*HEADERS, *(name.replace("_", "-") for name in more)])


@pytest.mark.parametrize("host", ["127.0.0.1:8501", "localhost", "[::1]:8501", "LOCALHOST:1"])
def test_a_browser_on_this_machine_may(host: str) -> None:
    assert may_use_local_token(visit(host=host), SERVICE)
    assert may_use_local_token(visit(host=host, ip="127.0.0.1"), "http://[::1]:8000")


@pytest.mark.parametrize(
    ("found", "service"),
    [
        (visit(server=None), SERVICE),
        (visit(server=""), SERVICE),
        (visit(server="0.0.0.0"), SERVICE),
        (visit(server="192.0.2.4"), SERVICE),
        (visit(ip="192.0.2.7"), SERVICE),
        (visit(host="train.example.org"), SERVICE),
        (visit(host="127.0.0.1.example.org"), SERVICE),
        (visit(host=None), SERVICE),
        (visit(host="["), SERVICE),
        (visit(X_Forwarded_For="1"), SERVICE),
        (visit(forwarded="1"), SERVICE),
        (visit(Via="1"), SERVICE),
        (visit(x_real_ip="1"), SERVICE),
        (visit(), "https://gxpo.example.org"),
        (visit(), "http://0.0.0.0:8000"),
        (visit(), "nonsense"),
    ],
)
def test_everybody_else_may_not(found: Visit, service: str) -> None:
    assert not may_use_local_token(found, service)


def test_loopback_is_told_by_address_and_not_by_prefix() -> None:
    assert is_loopback_host("127.8.9.1")
    assert not is_loopback_host("127.0.0.1.nip.example")
    assert not is_loopback_host("128.0.0.1")
    assert not is_loopback_host(None)
    assert host_of("[::1]:80") == "::1"
    assert host_of("a:80") == "a"


def test_only_the_links_secret_signs_in() -> None:
    assert has_secret("s3cret", None, "s3cret")
    assert has_secret("s3cret", "s3cret", "old")
    assert not has_secret("s3cret", None, "")
    assert not has_secret("s3cret", "S3CRET", "s3cre")
    assert not has_secret("s3cret", "ü")
    assert not has_secret(None, None, "")
    assert cookie_name("127.0.0.1:8501") == "gxpo-link-8501"


def test_a_token_file_that_cannot_be_read_is_no_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_local_token(str(file)) is None
    assert read_local_token(None) is None
    file.write_text(" \n", encoding="utf-8")
    assert read_local_token(str(file)) is None
    file.write_text("gxpo_abc\n", encoding="utf-8")
    assert read_local_token(str(file)) == "gxpo_abc"
