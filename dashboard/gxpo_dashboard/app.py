"""Entry point of the dashboard (`streamlit run`): navigation, sign-in, and the search of Ctrl-K."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import streamlit as st

from gxpo_client.errors import ServiceError
from gxpo_dashboard.labels import STATES, plain
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.session.permalinks import go
from gxpo_dashboard.views import actions, benchmarks, compare, run, runs, submit
from gxpo_dashboard.widgets import focus

# Name in the URL → title, icon and function.
VIEWS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "runs": ("Runs", ":material/list:", runs.show),
    "run": ("Run", ":material/monitoring:", run.show),
    "compare": ("Compare", ":material/compare_arrows:", compare.show),
    "benchmarks": ("Benchmarks", ":material/leaderboard:", benchmarks.show),
    "submit": ("Submit", ":material/add_circle:", submit.show),
}
_MOST_RUNS = 8
Entry = tuple[str, str, dict[str, Any]]
"""Label, icon, and query of the address or, for a change, the dialog to `ask` and the run, or the run to `clone`."""


def _entry_point() -> None:
    """Streamlit's pages are only entry points; see permalinks.py."""


@st.cache_resource
def _set_up() -> None:
    """Freeze the objects created at import. Streamlit collects garbage after every fragment run, over all objects of
    the process, and sends nothing during a collection."""
    gc.collect()
    gc.freeze()


def _close_search() -> None:
    st.session_state.pop("searching", None)


@st.dialog("Go to", width="medium", on_dismiss=_close_search)
def _search() -> None:
    """Search of runs, views, parts of the open run, and actions that are links."""
    if "opened" in st.session_state:
        st.rerun()  # the page opens it
    text = st.text_input(
        "Search runs, views and actions", key="palette", live=True, placeholder="run, view or action",
        label_visibility="collapsed", max_chars=200,
    )  # fmt: skip
    focus("[role=dialog] input")
    matches = [entry for entry in _pages() if all(word in entry[0].lower() for word in text.lower().split())]
    with visitor.guarded():
        items = visitor.client().get("/runs", text=text.strip(), limit=_MOST_RUNS, archived="any")["items"]
        for item in sorted(items, key=lambda item: item["name"].lower() != text.strip().lower()):
            label = f"{item['name']} · {STATES.get(item['state'], item['state'])}"
            matches.append((label, ":material/monitoring:", {"view": "run", "run": item["id"]}))
    if not matches:
        st.caption("No matches. Change the search.")
    # In the keyboard's order: Tab leads from the box to the first match, which Enter opens.
    with st.container(gap=None, height=420):
        for number, (label, icon, query) in enumerate(matches):
            # By a callback: a page that changes at this moment runs instead of the search, and would drop the press.
            st.button(
                plain(label), icon=icon, type="tertiary", key=f"palette-{number}",
                on_click=st.session_state.update, args=({"opened": query},),
            )  # fmt: skip


def _pages() -> Iterator[Entry]:
    """What can be opened besides runs."""
    if of := st.query_params.get("run"):
        for part, sections in run.PARTS.items():
            for section in sections:
                label = part if part == section else f"{part} › {section}"
                yield f"This run › {label}", ":material/tab:", {"view": "run", "run": of, **run.address(section)}
        yield "This run › Clone", ":material/content_copy:", {"clone": of}
        possible: list[str] = []
        with suppress(ServiceError):  # a run that is gone, or an outage
            possible = visitor.client().run(of)["possible_actions"]
        for action in [name for name in ("cancel", "delete") if name in possible and visitor.may_change()]:
            yield f"This run › {action.capitalize()}…", f":material/{action}:", {"ask": action, "run": of}
    for name, (title, icon, _) in VIEWS.items():
        yield title, icon, {"view": name}
    for label, query in runs.SAVED.items():
        yield f"Runs › {label}", ":material/bookmark:", {"view": "runs", **query}


STYLE = Path(__file__).with_name("style.css")
CROSSHAIR = Path(__file__).with_name("crosshair.js").read_text(encoding="utf-8")
ICON = str(Path(__file__).with_name("icon.png"))
NO_CHART = {"mark": {"type": "point", "aria": False}, "data": {"values": []}}
entries = [st.Page(_entry_point, title=title, url_path=name) for name, (title, _, _) in VIEWS.items()]
entry = st.navigation([st.Page(_entry_point, title="gxpo", default=True), *entries], position="hidden")
view = permalinks.view_of(st.query_params, entry.url_path, list(VIEWS))
title, _, show = VIEWS[view]
st.set_page_config(page_title=f"{title} · gxpo", page_icon=ICON, layout="wide")
st.html(STYLE)
# Without a token only the sign-in is shown.
if visitor.enter():
    if opened := st.session_state.pop("opened", None):
        _close_search()
        with visitor.guarded():
            if "clone" in opened:
                actions.clone(visitor.client().run(opened["clone"]))
            if "ask" in opened:
                actions.ask(opened["ask"], [visitor.client().run(opened["run"])])
            go(**opened)
    me = st.session_state["me"]
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        permalinks.bar({name: (title, icon) for name, (title, icon, _) in VIEWS.items()}, view)
        st.button(
            "Search", icon=":material/search:", type="tertiary", key="nav-search", shortcut="Ctrl+K",
            on_click=st.session_state.update, kwargs={"searching": True, "palette": ""},
        )  # fmt: skip
        if "searching" in st.session_state:  # a page that changes while words are typed draws it again
            _search()
        with st.popover(plain(me["name"]), icon=":material/account_circle:", type="tertiary"):
            st.markdown(f"Signed in as **{plain(me['name'])}**, {plain(me['role'])}")
            st.text(f"Service: {visitor.service_url()}")
            st.button("Sign out", on_click=visitor.sign_out, icon=":material/logout:")
    # Once a session, an empty chart makes the browser load Vega: while a view with charts is computed, or after others.
    place, before = st.empty(), view in ("run", "compare", "benchmarks")
    is_first = "charts" not in st.session_state
    if is_first and before:
        place.vega_lite_chart(None, NO_CHART, height=1)
    show()
    if is_first:
        place.empty() if before else st.vega_lite_chart(None, NO_CHART, height=1)
        st.session_state["charts"] = True
    st.components.v2.component("gxpo_crosshair", js=CROSSHAIR, isolate_styles=False)(key="crosshair")
    _set_up()
