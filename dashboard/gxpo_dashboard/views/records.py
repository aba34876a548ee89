"""Records of a run: samples, events, log, config and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.formats import count, figure, moment, percent, size
from gxpo_dashboard.labels import TERMINAL, VERDICT_COLORS, VERDICTS, plain, with_formulas
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models.series import number
from gxpo_dashboard.view_models.tables import episode_facts, turn_rows
from gxpo_dashboard.widgets import cursors, download, empty, pager, untrusted

Json = dict[str, Any]

_PAGE = 50
_MOST_EVENTS = 5000
"""The newest ones; those before them are available from the API."""
_MOST_RESPONSES = 500
"""Responses of a group, the largest page of the service."""
_DIRECT_DOWNLOAD = 200 * 1024 * 1024
"""Maximum size of a download through the page; larger checkpoints show a curl command."""


def samples(run: str, x: str) -> None:
    """Prompt, response or its turns, extracted answer, gold answer and verdict of each sample."""
    steps = [str(step) for step in visitor.client().get("/runs", run, "samples", limit=1)["steps"]]
    if not steps:
        none(run, "samples")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        offered = {"": "newest"} | {step: step for step in ("all", *reversed(steps))}
        step = permalinks.select("Step", "step", offered, "", width=160)
        verdict = permalinks.select("Verdict", "verdict", {"": "any"} | VERDICTS, "", width=220)
    visited = cursors("samples", (run, step, verdict))
    query = {"step": {"": steps[-1], "all": None}.get(step or "", step), "verdict": verdict, "limit": _PAGE}
    page = visitor.client().get("/runs", run, "samples", **query, cursor=visited[-1] if visited else None)
    items = page["items"]
    if not items:
        empty("No matching samples", "Select another step or verdict.")
        return
    groups = by_prompt(items)
    listed, read = st.columns([2, 3])
    with listed:
        row = _group_list(groups, page["groups"], run)
        pager("samples", visited, page["next_cursor"], len(visited) * _PAGE, len(items))
    with read:
        # The page may have a part of the group.
        first = groups[row][0]
        query = {"step": first["step"], "group": first["group"], "verdict": verdict, "limit": _MOST_RESPONSES}
        whole = by_prompt(visitor.client().get("/runs", run, "samples", **query)["items"])
        _group(next((group for group in whole if _identity(group[0]) == _identity(first)), groups[row]))


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
        empty(f"No {what}" + ("" if run["state"] in TERMINAL else " yet"), plain(state["text"]) + hint)


def by_prompt(items: Sequence[Json]) -> list[list[Json]]:
    """Samples of one prompt and step together, in order of their first one."""
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for item in items:
        groups.setdefault(_identity(item), []).append(item)
    return list(groups.values())


def _identity(item: Json) -> tuple[Any, ...]:
    """Of the group of a sample, or of a group's counts."""
    return item["step"], item["attempt"], item["group"], item["prompt_id"]


def _group_list(groups: list[list[Json]], counts: list[Json], run: str) -> int:
    """A row per prompt; returns the selected one. A newer first step clears the selection, because rows move.

    counts: of the whole groups, of which the page and the filter may have a part.
    """
    whole = {_identity(group): group for group in counts}
    rows = []
    for first, *_ in groups:
        group = whole[_identity(first)]
        rows.append((first["step"], group["correct"], group["responses"], first["prompt"]))
    column = st.column_config
    event = st.dataframe(
        pd.DataFrame(rows, columns=["Step", "Correct", "Responses", "Prompt"]),
        key=f"samples-{run}-{groups[0][0]['step']}",
        hide_index=True,
        height=560,
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            **dict.fromkeys(("Step", "Correct", "Responses"), column.NumberColumn(width="small")),
            "Prompt": column.TextColumn(width="large"),
        },
        alt="Prompts: select one to read its responses",
    )
    return next((row for row in event.selection.rows if row < len(groups)), 0)


def _group(group: list[Json]) -> None:
    """A prompt with all its responses."""
    first = group[0]
    with st.container(border=True):
        st.caption(f"Step {first['step']}, attempt {first['attempt']}, group {first['group']}.")
        _text("Prompt", first["prompt"])
        if shown := first["extra"].get("rendered_prompt"):
            with st.expander("What the policy saw"):
                untrusted("Rendered prompt", shown)
        untrusted("Gold answer", first["gold"] or "(none)")
    for item in group:
        with st.container(border=True):
            _response(item)


def _response(item: Json) -> None:
    verdict = item["verdict"]
    chip = f":{VERDICT_COLORS.get(verdict, 'gray')}-badge[{plain(VERDICTS.get(verdict, verdict))}]"
    extra = item["extra"]
    version = f", policy version {extra['weights_version']}" if "weights_version" in extra else ""
    cut = ", truncated" if item["truncated"] else ""
    facts = f"reward {figure(number(item['reward']))}, {count(item['length'])} tokens{cut}{version}"
    st.markdown(f"{chip} {plain(facts)}")
    rows = turn_rows(item)
    for heading, text in rows:
        untrusted(heading, text)  # without typeset formulas
    if not rows:
        _text("Response", item["response"])
    untrusted("Extracted answer", item["extracted"] if item["extracted"] is not None else "(none)")
    if extra.get("detail"):
        untrusted("Grader", extra["detail"])
    if ended := episode_facts(item):
        st.caption(plain(ended))
    if item.get("end_detail"):
        untrusted("Environment", item["end_detail"])


def _text(label: str, text: str) -> None:
    """Untrusted text as it is, and if it has formulas also with these typeset, in a second column."""
    formulas = with_formulas(text)
    if formulas is None:
        untrusted(label, text)
        return
    raw, typeset = st.columns(2)
    with raw:
        untrusted(label, text)
    with typeset:
        st.markdown(f"**{label}, typeset**")
        st.markdown(formulas)


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
        text = st.text_input("Search log", key="log-search", icon=":material/search:", placeholder="part of a line")
        fetch = partial(visitor.whole_log, visitor.client(), run)
        download("log", f"{run}.log", fetch, "log-download")
    # The window may begin in the middle of a line.
    whole = tail["text"].partition("\n")[2] if tail["offset"] else tail["text"]
    lines = whole.splitlines()
    matches = [line for line in lines if text.lower() in line.lower()] if text else lines
    matching = f"{count(len(matches))} of " if text else ""
    st.caption(f"{matching}{count(len(lines))} lines of the last {size(len(whole))} of {size(tail['size'])}.")
    # The container keeps its end in view while lines are added.
    with st.container(height=560, autoscroll=True, key="log"):
        st.code("\n".join(matches), language=None, wrap_lines=True)


def config(run: str, x: str) -> None:
    """The config and the recorded environment."""
    view = visitor.client().run(run)
    st.caption(f"Hash {plain(view['config_sha256'])}: equal for runs that differ only in name.")
    text = json.dumps(view["config"], indent=2)
    left, right = st.columns(2)
    with left:
        st.markdown("**Settings**")
        st.code(text, language=None, height=620)
        download("config (JSON)", f"{run}-config.json", text.encode, "config-json")
    with right:
        st.markdown("**Environment**")
        identity = {name: value for name, value in (view.get("identity") or {}).items() if name != "config"}
        if identity:
            st.code(json.dumps(identity, indent=2), language=None, height=620)
        else:
            st.caption("Recorded when the run starts.")


def checkpoints(run: str, x: str) -> None:
    """Checkpoints with download of the policy."""
    items = visitor.client().get("/runs", run, "checkpoints")["items"]
    if not items:
        none(run, "checkpoints", "Checkpoints are written every `checkpoint.every_steps` steps.")
        return
    for item in items:
        step, marks = item["step"], [word for word in ("best", "newest") if item.get(word)]
        with st.container(border=True, horizontal=True, vertical_alignment="center"):
            st.markdown(f"**Step {step}**" + (f" ({', '.join(marks)})" if marks else ""))
            st.caption(
                f"Accuracy {percent(number(item['score']))}, {size(item['size_bytes'])}, "
                f"{plain(moment(item['created_at']))}"
            )
            if (item["size_bytes"] or 0) <= _DIRECT_DOWNLOAD:
                fetch = partial(visitor.client().checkpoint_zip, run, step)
                download("policy", f"{run}-step-{step}.zip", fetch, f"checkpoint-{step}")
            else:
                url = f"{visitor.external_url()}/api/v1/runs/{run}/checkpoints/{step}/download"
                st.code(f'curl -H "Authorization: Bearer $GXPO_TOKEN" -o step-{step}.zip {url}', language=None)
