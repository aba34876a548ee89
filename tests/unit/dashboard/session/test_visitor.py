"""The address in copied commands, and what a session holds."""

from __future__ import annotations

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from gxpo_dashboard.session import visitor
from gxpo_dashboard.session.visitor import keep


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
