"""Who is signed in with the local token, and the sessions that the link of `gxpo up` opens."""

from __future__ import annotations

from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from streamlit.testing.v1 import AppTest

from gxpo_dashboard.server import CompressedScripts
from gxpo_dashboard.session import link
from gxpo_dashboard.session.permalinks import adopt, view_of

BROWSER: dict[str, Any] = {
    "service_url": "http://127.0.0.1:8000",
    "server_address": "127.0.0.1",
    "remote_ip": None,
    "host_header": "localhost:8501",
    "header_names": ["Host", "User-Agent", "Cookie"],
}


@pytest.mark.parametrize("host", ["127.0.0.1:8501", "localhost", "[::1]:8501", "LOCALHOST:1"])
def test_a_browser_on_this_machine_may(host: str) -> None:
    assert link.may_use_local_token(**BROWSER | {"host_header": host})
    others = {"host_header": host, "remote_ip": "127.0.0.1", "service_url": "http://[::1]:8000"}
    assert link.may_use_local_token(**BROWSER | others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("server_address", value) for value in (None, "", "0.0.0.0", "192.0.2.4")),
        ("remote_ip", "192.0.2.7"),
        *(("host_header", value) for value in ("train.example.org", "127.0.0.1.example.org", None, "", "[")),
        *(("header_names", ["host", name]) for name in ("X-Forwarded-For", "forwarded", "Via", "x-real-ip")),
        *(("service_url", value) for value in ("https://gxpo.example.org", "http://0.0.0.0:8000", "nonsense")),
    ],
)
def test_everybody_else_may_not(name: str, value: Any) -> None:
    assert not link.may_use_local_token(**BROWSER | {name: value})


def test_only_the_links_secret_signs_in_and_a_file_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert link.has_secret("s3cret", "s3cret")
    assert not any(link.has_secret("s3cret", other) for other in ("", "S3CRET", "s3cre", "ü"))
    assert not link.has_secret(None, "")
    file = tmp_path / "token"
    assert link.read_secret(str(file)) is link.read_secret(None) is None
    file.write_text(" \n", encoding="utf-8")
    assert link.read_secret(str(file)) is None
    file.write_text("gxpo_abc\n", encoding="utf-8")
    assert link.read_secret(str(file)) == "gxpo_abc"


def test_a_session_ends_by_sign_out_and_when_it_is_not_used() -> None:
    opened = link.LinkSessions()
    first, second = opened.open(0.0), opened.open(0.0)
    assert all(opened.is_open(first, uses * link.UNUSED_S) for uses in (1, 2)), "each use prolongs it"
    assert not opened.is_open(second, link.UNUSED_S + 1)
    assert not opened.is_open(second, 0.0), "what has ended stays ended"
    opened.close(first)
    assert not any(opened.is_open(value, 2 * link.UNUSED_S) for value in (first, None, "", "guessed"))


@pytest.mark.parametrize("shown", ["/compare?runs=a&runs=b&note=", "/", "//elsewhere.example/"])
def test_the_link_gives_a_cookie_not_its_secret(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s3cret", encoding="utf-8")
    monkeypatch.setenv("GXPO_LINK_SECRET_FILE", str(tmp_path / "secret"))
    page = Starlette(
        routes=[Route("/{path:path}", lambda _: PlainTextResponse("the page"))],
        middleware=[Middleware(link.LinkSignIn)],
    )
    browser = TestClient(page, "http://127.0.0.1:8501", follow_redirects=False)
    address = f"http://127.0.0.1:8501{shown}"
    signed_in, refused = (
        browser.get(f"{address}{'&' if '?' in shown else '?'}secret={secret}") for secret in ("s3cret", "wrong")
    )
    for answer in (signed_in, refused):
        assert (answer.status_code, answer.headers["location"]) == (303, address), "the same view on the same host"
    cookie = SimpleCookie(signed_in.headers["set-cookie"])["gxpo-session-8501"]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert "s3cret" not in cookie.value
    assert link.sessions.is_open(cookie.value, 0.0)
    unchanged = browser.get("/compare?runs=a")
    assert unchanged.text == "the page"
    assert not any("set-cookie" in answer.headers for answer in (refused, unchanged))


def test_scripts_are_compressed_and_downloads_are_not() -> None:
    page = Starlette(routes=[Route("/{path:path}", lambda _: PlainTextResponse("the page" * 1000))])
    browser = TestClient(CompressedScripts(page))
    encodings = [browser.get(path).headers.get("content-encoding") for path in ("/static/js/a.js", "/media/runs.zip")]
    assert encodings == ["gzip", None]


# Widgets and URL: the last change wins, and defaults are omitted.


@pytest.mark.parametrize(
    ("address", "written", "current", "default", "values"),
    [
        pytest.param(["gxpo"], None, None, ["grpo"], ["gxpo"], id="a link opens the view it names"),
        pytest.param([], None, None, ["grpo"], ["grpo"], id="without a parameter the default counts"),
        pytest.param(["a"], ["a"], ["b"], [], ["b"], id="a choice stays while the address is ours"),
        pytest.param([], [], ["b"], [], ["b"], id="also where the address is empty"),
        pytest.param(["old"], ["new"], ["new"], [], ["old"], id="the back button wins over the widget"),
        pytest.param([], ["new"], ["new"], ["d"], ["d"], id="also back to the default"),
        pytest.param(["a", "b"], ["a", "b"], None, [], ["a", "b"], id="a removed widget starts from the address"),
        pytest.param(["a"], ["a"], [], ["a", "b"], [], id="an emptied choice is no default"),
    ],
)
def test_the_last_change_wins(
    address: list[str], written: list[str] | None, current: list[str] | None, default: list[str], values: list[str]
) -> None:
    assert adopt(address, written, current, default) == values


def _script() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_dashboard.session import permalinks

    permalinks.multi("Columns", "cols", ["a", "b"], ["a", "b"])
    permalinks.text("Seeds", "seeds")
    st.session_state["group"] = permalinks.choice("Group", "group", {"": "all", "a": "A"}, "a")


def test_defaults_stay_out_of_the_address_and_an_emptied_choice_with_a_default_is_in_it() -> None:
    page = AppTest.from_function(_script).run(timeout=60)
    assert dict(page.query_params) == {}
    page.multiselect[0].unselect("a").run()
    page.text_input[0].set_value("0, 1").run()
    page.button_group[0].set_value("").run()
    assert page.session_state["group"] == ""
    assert dict(page.query_params) == {"cols": "b", "seeds": "0, 1", "group": ""}


def _interrupted() -> None:
    import streamlit as st

    from gxpo_dashboard.session import permalinks

    permalinks.selected("part", ["a", "b"], "a")
    if st.session_state.get("ends_early"):
        st.stop()
    st.session_state["part"] = permalinks.choice("Part", "part", ["a", "b"], "a")


def test_an_address_that_a_script_adopted_before_it_was_interrupted_does_not_come_back() -> None:
    """The back button interrupts a script that still draws the page; that page would replace the one it leads to."""
    page = AppTest.from_function(_interrupted).run(timeout=60)
    page.session_state["ends_early"], page.query_params["part"] = True, "b"
    page.run()
    page.session_state["ends_early"] = False
    del page.query_params["part"]
    page.run()
    assert page.session_state["part"] == "a"
    assert dict(page.query_params) == {}


def _zoomed() -> None:
    import streamlit as st

    from gxpo_dashboard.session import permalinks
    from gxpo_dashboard.widgets import axis

    st.session_state["span"] = permalinks.span(axis("over", "step"))


def test_a_zoom_is_typed_and_reset_by_keyboard() -> None:
    page = AppTest.from_function(_zoomed).run(timeout=60)
    for box, position in zip(page.text_input, ("5", "10"), strict=True):
        box.set_value(position).run()
    assert page.session_state["span"] == (5.0, 10.0)
    (reset,) = [button for button in page.button if button.label == "Reset zoom (5 to 10)"]
    reset.click().run()
    assert page.session_state["span"] is None
    assert [box.value for box in page.text_input] == ["", ""]


@pytest.mark.parametrize(
    ("address", "path", "view"),
    [
        ({"view": "compare"}, "/run", "compare"),
        ({}, "compare", "compare"),
        ({"view": "nonsense"}, "submit", "submit"),
        ({"view": "nonsense"}, "nonsense", "runs"),
        ({}, "", "runs"),
    ],
)
def test_the_parameter_names_the_view_and_the_path_is_an_entry(address: dict[str, str], path: str, view: str) -> None:
    assert view_of(address, path, ["runs", "run", "compare", "submit"]) == view
