"""Records of a run: samples, events, log, config and checkpoints."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.formats import count, moment, percent, size
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.text.labels import VERDICTS, plain
from gxpo_dashboard.view_models.series import number
from gxpo_dashboard.widgets.pages import cursors, pager
from gxpo_dashboard.widgets.shown import download, empty, foreign

Json = dict[str, Any]

_PAGE = 50
_LOG_WINDOW = 65_536
_EVENT_PARTS = 5
"""Pages of 1000 events; the rest of a very long history is available from the API."""
_DIRECT_DOWNLOAD = 200 * 1024 * 1024
"""Maximum size of a download through the page; larger checkpoints show a curl command."""


def samples(run: str, x: str) -> None:
    """Prompt, response, extracted answer, gold answer and verdict of each sample."""
    first = visitor.client().samples(run, limit=1)
    steps = [str(step) for step in first["steps"]]
    if not steps:
        empty("No samples yet", "Samples appear after the first step.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        offered = ["", *reversed(steps)]
        step = permalinks.select("Step", "step", offered, "", format_func=lambda s: s or "all", width=160)
        verdict = permalinks.select(
            "Verdict", "verdict", ["", *VERDICTS], "", format_func=lambda v: VERDICTS.get(v, "any"), width=220
        )
    visited = cursors("samples", (run, step, verdict))
    query = {"step": step, "verdict": verdict, "limit": _PAGE, "cursor": visited[-1] if visited else None}
    answer = visitor.client().samples(run, **query)
    items = answer["items"]
    if not items:
        empty("No matching samples", "Select another step or verdict.")
        return
    listed, read = st.columns([2, 3])
    with listed:
        row = _sample_list(items, run)
        pager("samples", visited, answer["next_cursor"], len(visited) * _PAGE, len(items))
    with read, st.container(border=True):
        _sample(items[row])


def _sample_list(items: list[Json], run: str) -> int:
    rows = [
        (VERDICTS.get(item["verdict"], item["verdict"]), item["step"], number(item["reward"]), item["prompt"])
        for item in items
    ]
    event = st.dataframe(
        pd.DataFrame(rows, columns=["Verdict", "Step", "Reward", "Prompt"]),
        key=f"samples-{run}",
        hide_index=True,
        height=560,
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "Verdict": st.column_config.TextColumn(width="small"),
            "Step": st.column_config.NumberColumn(width="small"),
            "Reward": st.column_config.NumberColumn(format="%.2f", width="small"),
            "Prompt": st.column_config.TextColumn(width="large"),
        },
        alt="Samples: select one to read it",
    )
    chosen = event.selection.rows
    return chosen[0] if chosen and chosen[0] < len(items) else 0


def _sample(item: Json) -> None:
    words = f"{VERDICTS.get(item['verdict'], item['verdict'])}, reward {number(item['reward']):.2f}"
    st.markdown(f"#### {plain(words)}")
    cut = ", truncated" if item["truncated"] else ""
    extra = item["extra"]
    version = f", policy version {extra['weights_version']}" if "weights_version" in extra else ""
    st.caption(
        f"Step {item['step']}, attempt {item['attempt']}, response {item['sample']} of group {item['group']}, "
        f"{count(item['length'])} tokens{cut}{version}."
    )
    foreign("Prompt", item["prompt"])
    foreign("Response", item["response"])
    extracted, gold = st.columns(2)
    with extracted:
        foreign("Extracted answer", item["extracted"] if item["extracted"] is not None else "(none)")
    with gold:
        foreign("Gold answer", item["gold"])
    if extra.get("detail"):
        foreign("Grader", extra["detail"])


def events(run: str, x: str) -> None:
    """Events of the run, newest first."""
    found = visitor.client().all_events(run, max_pages=_EVENT_PARTS)
    if not found:
        empty("No events yet", "State changes, checkpoints and failures appear here.")
        return
    rows = [(moment(item["time"]), item["actor"], item["kind"], item["message"]) for item in reversed(found)]
    frame = pd.DataFrame(rows, columns=["Time", "Actor", "Kind", "Message"])
    config = {"Message": st.column_config.TextColumn(width="large")}
    st.dataframe(frame, hide_index=True, column_config=config, key=f"events-{run}", alt="Events, newest first")


def log(run: str, x: str) -> None:
    """The end of the log, refreshed while the run executes."""
    answer = visitor.client().logs(run, offset=-_LOG_WINDOW, limit=_LOG_WINDOW)
    if not answer["size"]:
        empty("The log is empty", "It starts with the run's job.")
        return
    first = answer["offset"]
    st.caption(f"Showing the last {size(answer['next_offset'] - first)} of {size(answer['size'])}.")
    lines = answer["text"].splitlines()[1 if first else 0 :]
    # Newest first, so that new lines are visible without scrolling.
    newest_first = st.checkbox("Newest first", value=True, key="log-order")
    st.code("\n".join(reversed(lines) if newest_first else lines), language=None, height=560)


def config(run: str, x: str) -> None:
    """The config and the recorded environment."""
    found = visitor.client().run(run)
    st.caption(f"Hash {plain(found['config_sha256'])}: equal for runs that differ only in name.")
    text = json.dumps(found["config"], indent=2)
    left, right = st.columns(2)
    with left:
        st.markdown("**Settings**")
        st.code(text, language="json", height=620)
        download("Config (JSON)", f"{run}-config.json", text.encode, "config-json")
    with right:
        st.markdown("**Environment**")
        identity = {name: value for name, value in (found.get("identity") or {}).items() if name != "config"}
        if identity:
            st.code(json.dumps(identity, indent=2), language="json", height=620)
        else:
            st.caption("Recorded when the run starts.")


def checkpoints(run: str, x: str) -> None:
    """Checkpoints with download of the policy."""
    found = visitor.client().checkpoints(run)
    if not found:
        empty("No checkpoints yet", "Checkpoints are written every `checkpoint.every_steps` steps.")
        return
    for item in found:
        step, marks = item["step"], [word for word in ("best", "newest") if item.get(word)]
        with st.container(border=True, horizontal=True, vertical_alignment="center"):
            st.markdown(f"**Step {step}**" + (f" ({', '.join(marks)})" if marks else ""))
            st.caption(
                f"Accuracy {percent(number(item['score']))}, {size(item['size_bytes'])}, "
                f"{plain(moment(item['created_at']))}"
            )
            if (item["size_bytes"] or 0) <= _DIRECT_DOWNLOAD:
                fetch = partial(visitor.client().checkpoint_zip, run, step)
                download("Policy", f"{run}-step-{step}.zip", fetch, f"checkpoint-{step}")
            else:
                url = f"{visitor.service_url()}/api/v1/runs/{run}/checkpoints/{step}/download"
                st.code(f'curl -H "Authorization: Bearer $GXPO_TOKEN" -o step-{step}.zip {url}', language=None)
