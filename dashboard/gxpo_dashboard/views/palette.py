"""Ctrl-K: search of runs, views, parts of the open run, and actions that are links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import streamlit as st

from gxpo_client.errors import ServiceError
from gxpo_dashboard.labels import STATES, plain
from gxpo_dashboard.session import visitor
from gxpo_dashboard.session.permalinks import go
from gxpo_dashboard.views import actions, run, runs
from gxpo_dashboard.widgets import focus

_MOST_RUNS = 8
Entry = tuple[str, str, dict[str, Any]]
"""Label, icon, and query of the address or, for a change, the dialog to `ask` and the run."""


def button(titles: Mapping[str, tuple[str, str]]) -> None:
    """The button that opens the search. titles: of the views, with icons."""
    if st.button("Search", icon=":material/search:", type="tertiary", key="nav-search", shortcut="Ctrl+K"):
        # The page that the last search opened may still be drawn, and its words kept.
        st.session_state["palette"] = ""
        _dialog(titles)


@st.dialog("Go to", width="medium")
def _dialog(titles: Mapping[str, tuple[str, str]]) -> None:
    text = st.text_input(
        "Search runs, views and actions", key="palette", live=True, placeholder="run, view or action",
        label_visibility="collapsed",
    )  # fmt: skip
    focus("[role=dialog] input")
    found = [entry for entry in _pages(titles) if all(word in entry[0].lower() for word in text.lower().split())]
    with visitor.guarded():
        items = visitor.client().get("/runs", text=text, limit=_MOST_RUNS, archived="any")["items"]
        for item in sorted(items, key=lambda item: item["name"].lower() != text.strip().lower()):
            label = f"{item['name']} · {STATES.get(item['state'], item['state'])}"
            found.append((label, ":material/monitoring:", {"view": "run", "run": item["id"]}))
    if not found:
        st.caption("No matches. Change the search.")
    # In the keyboard's order: Tab leads from the box to the first match, which Enter opens.
    with st.container(gap=None, height=420):
        for number, (label, icon, query) in enumerate(found):
            if st.button(plain(label), icon=icon, type="tertiary", key=f"palette-{number}"):
                if "ask" in query:
                    actions.ask(query["ask"], [visitor.client().run(query["run"])])
                go(**query)


def _pages(titles: Mapping[str, tuple[str, str]]) -> Iterator[Entry]:
    """What can be opened besides runs."""
    if of := st.query_params.get("run"):
        for part, sections in run.PARTS.items():
            for section in sections:
                label = part if part == section else f"{part} › {section}"
                yield f"This run › {label}", ":material/tab:", {"view": "run", "run": of, "part": section}
        yield "This run › Clone", ":material/content_copy:", {"view": "submit", "preset": of}
        possible: list[str] = []
        with suppress(ServiceError):  # a run that is gone, or an outage
            possible = visitor.client().run(of)["possible_actions"]
        for action in [name for name in ("cancel", "delete") if name in possible and visitor.may_change()]:
            yield f"This run › {action.capitalize()}…", f":material/{action}:", {"ask": action, "run": of}
    for name, (title, icon) in titles.items():
        yield title, icon, {"view": name}
    yield "Submit › Sweep", ":material/grid_on:", {"view": "submit", "sweep": "1"}
    for label, view in runs.SAVED.items():
        yield f"Runs › {label}", ":material/bookmark:", {"view": "runs", **view}
