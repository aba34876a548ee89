"""Records of a run: events, log, config and checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.formats import NONE, age, count, moment, number_of, percent, size
from gxpo_dashboard.labels import TERMINAL, plain
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models import forms
from gxpo_dashboard.view_models.series import number
from gxpo_dashboard.widgets import download, empty

Json = dict[str, Any]

_MOST_EVENTS = 5000
"""The newest ones; those before them are available from the API."""
_MOST_OFFERED = 100
"""Recent runs that a config can be compared with; a link may name any other."""
_AROUND = range(-2, 3)
"""Lines around a match of the log, relative to its own."""
_DIRECT_DOWNLOAD = 200 * 1024 * 1024
"""Maximum size of a download through the page; larger checkpoints show a curl command."""


def none(run_id: str, what: str, otherwise: str = "") -> None:
    """Why a run has no `what`. otherwise: the reason of a run that has reported steps."""
    run = visitor.client().run(run_id)
    if run["pruned_at"] is not None and what in ("samples", "log lines"):
        at = plain(moment(run["pruned_at"]))
        empty("Deleted by retention", f"Samples and log: {at}. Metrics, evaluations and checkpoints are kept.")
    elif otherwise and run["progress"]["steps"]:
        empty(f"No {what}", otherwise)
    else:
        state = visitor.client().get("/runs", run_id, "headline")["parts"][0]
        hint = " Engines compile; the first step takes longest." if run["phase"] == "starting engines" else ""
        hint += f" [Open](?view=run&run={state['runs'][0]})" if state["runs"] else ""
        ended = run["state"] in TERMINAL
        hint += f" It reported no {what}." if ended and run["progress"]["steps"] else ""
        empty(f"No {what}" + ("" if ended else " yet"), plain(state["text"]) + hint)


def events(run: str, x: str) -> None:
    """Events of the run, newest first."""
    items = visitor.client().all_of("/runs", run, "events", limit=_MOST_EVENTS, page_size=1000, order="desc")
    if not items:
        empty("No events yet", "State changes, checkpoints and failures appear here.")
        return
    rows = [(moment(item["time"]), item["actor"], item["kind"], item["message"]) for item in items]
    frame = pd.DataFrame(rows, columns=["Time", "Actor", "Kind", "Message"])
    config = {"Message": st.column_config.TextColumn(width="large")}
    st.dataframe(frame, hide_index=True, column_config=config, key=f"events-{run}", alt="Events, newest first")
    if len(items) == _MOST_EVENTS:
        st.caption(f"Showing the newest {count(_MOST_EVENTS)} events; earlier ones are available from the API.")


def log(run: str, x: str) -> None:
    """The log, oldest line first; follows its end while the run executes."""
    window = visitor.LOG_WINDOW
    tail = visitor.client().get("/runs", run, "logs", offset=-window, limit=window)
    if not tail["size"]:
        none(run, "log lines")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = permalinks.text("Search log", "log", icon=":material/search:", placeholder="part of a line")
        fetch = partial(visitor.whole_log, visitor.client(), run)
        download("log", f"{run}.log", fetch, "log-download")
    # The window may begin in the middle of a line, or have no other.
    whole = (tail["text"].partition("\n")[2] if tail["offset"] else "") or tail["text"]
    lines = whole.splitlines()
    matches, shown = in_context(lines, text) if text else (0, lines)
    matching = f"{number_of(matches, 'matching line')} in " if text else ""
    last = size(len(whole.encode()))
    st.caption(f"{matching}{number_of(len(lines), 'line')} of the last {last} of {size(tail['size'])}.")
    # The container keeps its end in view while lines are added.
    with st.container(height=560, autoscroll=True, key="log"):
        st.code("\n".join(shown), language=None, wrap_lines=True)


def in_context(lines: Sequence[str], text: str) -> tuple[int, list[str]]:
    """How many lines contain the text, and these lines, marked, each between those around it."""
    found = {place for place, line in enumerate(lines) if text.lower() in line.lower()}
    near = sorted({place + by for place in found for by in _AROUND if 0 <= place + by < len(lines)})
    shown: list[str] = []
    for before, place in zip([-1, *near], near, strict=False):
        gap = ["⋯"] if place > before + 1 else []
        shown += [*gap, f"{'▸' if place in found else ' '} {lines[place]}"]
    return len(found), shown


def config(run: str, x: str) -> None:
    """The settings that differ from those of a preset or another run, or all that a search finds."""
    view = visitor.client().run(run)
    _, presets = visitor.catalogue(visitor.service_url(), visitor.client())
    own = forms.flat(view["config"])
    others = {preset["name"]: forms.flat(preset["config"]) for preset in presets}
    nearest = min(others, key=lambda name: sum(forms.differences(own, others[name]).values()))
    recent = visitor.client().get("/runs", limit=_MOST_OFFERED)["items"]
    labels = {item["id"]: f"run {item['name']} ({item['id'][-6:]})" for item in recent if item["id"] != run}
    labels |= {name: f"preset {name}" for name in others}
    if (named := st.query_params.get("against", nearest)) not in labels:
        labels[named] = f"run {named}"
    with st.container(horizontal=True, vertical_alignment="bottom"):
        against = permalinks.select("Compare with", "against", labels, nearest, width=380)
        text = permalinks.text("Search settings", "setting", placeholder="rate, gate, …", icon=":material/search:")
        every = permalinks.check("Unchanged settings", "unchanged")
        download("config (JSON)", f"{run}-config.json", json.dumps(view["config"], indent=2).encode, "config-json")
    other = others.get(against) or forms.flat(visitor.client().run(against)["config"])
    changed = forms.differences(own, other)
    words = text.lower().split()
    shown = [path for path in changed if (every or changed[path]) and all(word in path.lower() for word in words)]
    num = f"{number_of(sum(changed.values()), 'setting')} of {count(len(changed))}"
    st.caption(f"{num} differ from {plain(labels[against])}.")
    cells = [[path, *(_value(side, path) for side in (own, other)), "≠" if changed[path] else ""] for path in shown]
    frame = pd.DataFrame(cells, columns=["Setting", "This run", f"In {labels[against]}", "Differs"], dtype="str")
    frame = frame if every else frame.drop(columns="Differs")
    st.dataframe(frame, hide_index=True, height=min(38 + 35 * max(1, len(frame)), 560), alt="Settings of both")
    with st.expander("Environment", icon=":material/memory:"):
        st.caption(f"Config hash {plain(view['config_sha256'])}: equal for runs that differ only in name.")
        identity = {name: value for name, value in (view.get("identity") or {}).items() if name != "config"}
        st.code(json.dumps(identity, indent=2) if identity else "Recorded when the run starts.", language=None)


def _value(config: Json, path: str) -> str:
    """A setting as text; a dash where the config has none."""
    value = config.get(path, NONE)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def checkpoints(run: str, x: str) -> None:
    """Checkpoints with download of the policy."""
    items = visitor.client().get("/runs", run, "checkpoints")["items"]
    if not items:
        none(run, "checkpoints", "Checkpoints are written every `checkpoint.every_steps` steps.")
        return
    for item in items:
        step, marks = item["step"], [word for word in ("best", "newest") if item.get(word)]
        with st.container(border=True, horizontal=True, vertical_alignment="center"):
            st.markdown(f"**Step {count(step)}**" + (f" ({', '.join(marks)})" if marks else ""))
            st.caption(
                f"Accuracy {percent(number(item['score']))}, {size(item['size_bytes'])}, "
                f"{age(time.time() - item['created_at'])} ({plain(moment(item['created_at']))})"
            )
            if (item["size_bytes"] or 0) <= _DIRECT_DOWNLOAD:
                fetch = partial(visitor.client().checkpoint_zip, run, step)
                download("policy", f"{run}-step-{step}.zip", fetch, f"checkpoint-{step}")
            else:
                url = f"{visitor.service_url(external=True)}/api/v1/runs/{run}/checkpoints/{step}/download"
                st.code(f'curl -H "Authorization: Bearer $GXPO_TOKEN" -o step-{step}.zip {url}', language=None)
