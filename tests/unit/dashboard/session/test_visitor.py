"""Who is signed in with the local token, the address in copied commands, and bounded stores of a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from gxpo_client.connection import is_loopback_host
from gxpo_dashboard.session import visitor
from gxpo_dashboard.session.visitor import (
    cookie_name,
    has_secret,
    host_of,
    keep,
    may_use_local_token,
    read_local_token,
)

BROWSER: dict[str, Any] = {
    "service_url": "http://127.0.0.1:8000",
    "server_address": "127.0.0.1",
    "remote_ip": None,
    "host_header": "localhost:8501",
    "header_names": ["Host", "User-Agent", "Cookie"],
}


@pytest.mark.parametrize("host", ["127.0.0.1:8501", "localhost", "[::1]:8501", "LOCALHOST:1"])
def test_a_browser_on_this_machine_may(host: str) -> None:
    assert may_use_local_token(**BROWSER | {"host_header": host})
    others = {"host_header": host, "remote_ip": "127.0.0.1", "service_url": "http://[::1]:8000"}
    assert may_use_local_token(**BROWSER | others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("server_address", value) for value in (None, "", "0.0.0.0", "192.0.2.4")),
        ("remote_ip", "192.0.2.7"),
        *(("host_header", value) for value in ("train.example.org", "127.0.0.1.example.org", None, "[")),
        *(("header_names", ["host", name]) for name in ("X-Forwarded-For", "forwarded", "Via", "x-real-ip")),
        *(("service_url", value) for value in ("https://gxpo.example.org", "http://0.0.0.0:8000", "nonsense")),
    ],
)
def test_everybody_else_may_not(name: str, value: Any) -> None:
    assert not may_use_local_token(**BROWSER | {name: value})


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


@pytest.mark.parametrize(
    ("own", "external", "address"),
    [
        ("http://api:8000", "https://gxpo.example/api-host/", "https://gxpo.example/api-host"),
        ("http://api:8000/", "", "http://api:8000"),
        (None, None, "http://127.0.0.1:8000"),
    ],
)
def test_commands_name_the_address_for_people(
    own: str | None, external: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GXPO_URL", own), ("GXPO_EXTERNAL_URL", external)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert visitor.external_url() == address
    assert visitor.service_url() == (own or "http://127.0.0.1:8000"), "the dashboard itself uses its own"


def test_the_oldest_entries_are_dropped_and_a_change_makes_an_entry_the_newest() -> None:
    store: dict[str, int] = {}
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        assert keep(store, key, value, 2) == value
    assert store == {"a": 3, "c": 4}


class Logs:
    """Serves a log of one line for any run."""

    def get(self, path: str, run: str, part: str, *, offset: int, limit: int) -> dict[str, Any]:
        assert (path, part) == ("/runs", "logs")
        return {"text": f"{run}\n" if offset < 1 else "", "offset": 0, "next_offset": 3, "size": 3}


def _script() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_dashboard.session import visitor

    for number in (0, 1, 2, 3, 0, 4, 5):
        assert visitor.log_tail(f"r{number}")["text"] == f"r{number}\n"
    st.session_state["held"] = list(st.session_state["logs"])
    visitor.sign_out()
    st.session_state["after"] = "logs" in st.session_state


def test_a_session_holds_few_logs_and_none_after_the_sign_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitor, "client", Logs)
    app = AppTest.from_function(_script).run(timeout=60)
    assert not app.exception
    assert app.session_state["held"] == ["r3", "r0", "r4", "r5"]
    assert app.session_state["after"] is False
