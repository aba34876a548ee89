"""Runs view: a filtered table of runs, and actions on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from gxpo_client.client import Client, keep
from gxpo_client.errors import Refused, ServiceError
from gxpo_client.formats import NONE, comma_separated, count, number_of, significant
from gxpo_dashboard.charts.curves import EVALUATED, sparkline
from gxpo_dashboard.charts.scores import settings_table
from gxpo_dashboard.labels import ACTIONS, STATES, plain, state_chip
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.session.permalinks import go
from gxpo_dashboard.view_models import tables
from gxpo_dashboard.view_models.series import Points
from gxpo_dashboard.views import actions, explorer
from gxpo_dashboard.widgets import cursors, empty, pager, sentence, table, text_table

Json = dict[str, Any]

PAGE = 50
"""Runs of a page."""
_METRIC_RUNS = 50
_METRIC_COLUMNS_S = 30.0
"""Time until the metrics that are offered as columns are requested again."""
PREVIEWED = ("reward/mean", EVALUATED)
_MOST_PREVIEWED = 8
SAVED: dict[str, Json] = {
    "All runs": {},
    "Active": {"state": ["queued", "starting", "running", "recovering", "pausing", "cancelling"]},
    "Failed": {"state": ["failed"], "cols": ["name", "state", "rule", "reason", "step", "created", "tags"]},
    "Most accurate": {"sort": "score_best"},
}


def show() -> None:
    header = st.container(horizontal=True, vertical_alignment="center", gap="small")
    header.title("Runs", width="content")
    actions.dialogs()
    st.session_state["axis"] = ""  # the curves next to the table have no zoom
    with header.popover("Views", icon=":material/bookmark:"):
        for label, view in SAVED.items():
            if st.button(label, type="tertiary", key=f"saved-{label}"):
                go("runs", **view)
        st.caption("Filters, columns and order are in the address: bookmark it to save a view of your own.")
    query, columns, baseline = _filters()
    query["with_metric"] = tables.further(columns, tables.METRIC)
    query["with_setting"] = tables.further(columns, tables.SETTING)
    st.fragment(run_every=visitor.LIVE_S + 1)(_list)(query, columns, baseline)


def _filters() -> tuple[Json, list[str], str]:
    """Filters, order and columns, all in the URL."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words, icon = "name, notes, tag, model, id", ":material/search:"
        text = permalinks.text("Search", "text", placeholder=words, icon=icon, max_chars=200).strip()
        states = permalinks.multi("State", "state", STATES, placeholder="any")
        rules = visitor.rules()
        # The rule in the URL is kept while the service does not answer.
        names = rules.names or st.query_params.get_all("rule")
        labels = {"": "any"} | {name: rules.of({"name": name}).label for name in names}
        rule = permalinks.select("Rule", "rule", labels, "")
    with st.expander("More filters, and columns", icon=":material/tune:"):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            tags = permalinks.text("Tags", "tag", placeholder="all of these, comma-separated")
            group = permalinks.text("Group", "group", placeholder="group id")
            baseline = permalinks.text("Baseline run", "base", placeholder="run id, or pin one below")
        columns = permalinks.multi("Columns", "cols", _offered(), tables.DEFAULTS)
        archived = permalinks.check("Include archived", "archived")
    sort = st.query_params.get("sort", "")  # written by a click on a header
    if sort not in tables.ORDERED and not sort.startswith(tables.METRIC):
        sort = "created_at"
    query = {
        "text": text,
        "state": states,
        "rule": rule,
        "sort": sort,
        "order": "asc" if st.query_params.get("order") == "asc" else "desc",
        "tag": comma_separated(tags),
        "group": group,
        "limit": PAGE,
        "archived": "any" if archived else "false",
    }
    first, *others = columns or tables.DEFAULTS
    if (ordered := tables.ORDERED.get(sort, sort)) not in (first, *others):
        others.insert(0, ordered)
    return query, [first, *others], baseline


def _offered() -> dict[str, str]:
    """All columns with their labels: those of every run, settings, metrics of recent runs, and those in the URL."""
    metrics: list[str] = []
    with suppress(ServiceError):
        metrics = _metric_columns(visitor.service_url(), visitor.client())
    settings = [tables.SETTING + path for path in visitor.rules().settings]
    columns = (*tables.COLUMNS, *settings, *metrics, *st.query_params.get_all("cols"))
    return {name: tables.column(name).label for name in columns}


@st.cache_data(ttl=_METRIC_COLUMNS_S, max_entries=4, show_spinner=False)
def _metric_columns(url: str, _service: Client) -> list[str]:
    """Metrics of the newest run of each rule, among the newest runs that have metrics."""
    recent = _service.get("/runs", limit=_METRIC_RUNS, state=["running", "succeeded"])["items"]
    newest = {run["rule"]: run["id"] for run in reversed(recent)}
    return list(dict.fromkeys(tables.METRIC + name for run in newest.values() for name in _service.metric_names(run)))


def _list(query: Json, columns: Sequence[str], baseline_id: str) -> None:
    """A row per run, page by page."""
    with visitor.guarded():
        visited = cursors("runs", query)
        key = f"runs-{len(visited)}"
        if opened := (st.session_state.get(key) or {}).get("opened"):
            go("run", run=opened)  # before the list is requested and drawn for nothing
        page = visitor.client().get("/runs", **query, cursor=visited[-1] if visited else None)
        runs = page["items"]
        if not visited:  # later pages do not say what all of them hold
            st.session_state["runs_whole"] = page
        whole = st.session_state.get("runs_whole", {})
        total = whole.get("total")
        if not runs:
            _nothing(query, bool(visited))
        else:
            _table(runs, columns, key, query, whole, _baseline(baseline_id, runs))
        if visited or page["next_cursor"]:
            of = f" of {count(total)}" if total is not None else ""
            pager("runs", visited, page["next_cursor"], len(visited) * query["limit"], len(runs), of)


def _table(
    runs: list[Json],
    columns: Sequence[str],
    key: str,
    query: Json,
    whole: Json,
    baseline: Json | None,
) -> None:
    """Show the runs below the actions on the selected ones, next to their curves. A click on a header orders by its
    column, in the service: the table has one page alone."""
    by_id = {run["id"]: run for run in runs}
    state = st.session_state.get(key) or {}
    kept = state.get("selected")
    # Streamlit forgets what is selected in a table that is not shown.
    selected = [run for run in st.session_state.get(f"selection-{key}", []) if run in by_id]
    selected = selected if kept is None else [run for run in by_id if run in kept]
    st.session_state[f"selection-{key}"] = selected
    chosen = [by_id[run] for run in selected]
    _bar(chosen, baseline, whole)
    pointed = [by_id[run] for run in [state.get("pointed")] if chosen and run in by_id]
    previewed = {run["id"]: run for run in (*chosen[: _MOST_PREVIEWED - len(pointed)], *pointed)}
    rules = visitor.rules()
    colors = rules.colors({id: run["rule"] for id, run in previewed.items()})
    sort: str = query["sort"]
    ordered = tables.ORDERED.get(sort, sort)
    trends = _trends(runs) if "trend" in columns else {}
    rows = [tables.cells(run, baseline=baseline, trend=trends.get(run["id"])) for run in runs]
    shown = tables.filled(rows, columns, ("name", "state", ordered))
    # Always two columns: a table that moves to another place of the page loses its scroll position.
    listed, preview = st.columns([3, 2] if chosen else [1, 0.001], gap="small" if chosen else None)
    with listed:
        report = table(
            key,
            "Runs with state, progress, accuracy and cost",
            [
                {"name": name, "label": shape.label, "help": shape.help, "kind": shape.kind, "order": bool(shape.order)}
                for name, shape in ((name, tables.column(name)) for name in shown)
            ],
            [
                {
                    "id": run["id"],
                    "name": run["name"],
                    "color": colors.get(run["id"]) or rules.of({"name": run["rule"]}).color,
                    "cells": [row.get(name, NONE) for name in shown],
                }
                for run, row in zip(runs, rows, strict=True)
            ],
            selected,
            sorted=ordered,
            descending=query["order"] == "desc",
            links=True,
        )
    if report.order:
        order = "asc" if report.order == ordered and query["order"] == "desc" else "desc"
        permalinks.write({"sort": [tables.column(report.order).order], "order": [order]})
        st.rerun()
    if report.compared:
        go("compare", runs=[run["id"] for run in chosen])
    if chosen:
        with preview:
            headline = st.container()
            with suppress(ServiceError):  # the list and its actions do without
                explorer.draw(previewed, PREVIEWED, "backward_passes", columns=1)
            if len(chosen) > 1 and all(run["score"] is not None for run in chosen):
                with suppress(ServiceError):
                    comparison = visitor.client().get("/compare", runs=[run["id"] for run in chosen], gates=False)
                    headline.markdown(f"**{plain(comparison['evidence'].partition(chr(10))[0])}**")
                    settings = settings_table(comparison)
                    in_all = settings[(settings != NONE).all(axis=1)]  # not those that one rule alone has
                    if len(in_all):
                        text_table(in_all, "Settings that differ")


def _trends(runs: Sequence[Json]) -> dict[str, tuple[str, str] | None]:
    """Pictures of each run's rewards, and their text; requested again only when a run has changed."""
    store: dict[str, tuple[Any, tuple[str, str] | None]] = st.session_state.setdefault("trends", {})
    stale = [run for run in runs if store.get(run["id"], (None,))[0] != (run["attempt"], run["progress"]["steps"])]
    ids, rules = [run["id"] for run in stale], visitor.rules()
    rewards = visitor.client().metrics_of(ids, ["reward/mean"], "step", None, 40) if stale else {}
    for run in stale:
        points = Points()
        points.extend(rewards[run["id"]]["series"]["reward/mean"])
        picture = sparkline([(x, y) for _, x, y, *_ in points.drawn], rules.of({"name": run["rule"]}).color)
        known = [y for y in points.y if math.isfinite(y)]
        trend = (picture, f"Reward {significant(known[0])} to {significant(known[-1])}") if known else None
        keep(store, run["id"], ((run["attempt"], run["progress"]["steps"]), trend), 1000)
    return {run["id"]: store[run["id"]][1] for run in runs if run["id"] in store}


def _bar(chosen: list[Json], baseline: Json | None, whole: Json) -> None:
    """The headline of the list, or actions on the selected runs: as high without any, so that rows stay where they are.

    whole: the list's first page.
    """
    ids = [run["id"] for run in chosen]
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="bar"):
        total = f"**{number_of(whole.get('total') or 0, 'run')}**"
        if not chosen:
            states = whole.get("states") or {}
            chips = [f"{count(states[state])} {state_chip(state)}" for state in STATES if state in states]
            st.markdown(f"{total} {' '.join(chips)}", width="content")
            for part in (whole.get("headline") or {"parts": []})["parts"]:
                if part["runs"] and sentence(part, "headline-best"):
                    go("run", run=part["runs"][0])
            pinned = f" Baseline: {plain(baseline['name'])}." if baseline is not None else ""
            keys = "Keys: j and k move, x selects, Enter opens, c compares."
            st.caption(f"Select rows to act on them. {keys}{pinned}", width="content")
            return
        names = ", ".join(plain(run["name"]) for run in chosen[:2]) + (" …" if len(chosen) > 2 else "")
        st.markdown(f"{total}, **{len(chosen)} selected** {names}", width="content")
        if len(chosen) == 1 and st.button("Open", icon=":material/monitoring:"):
            go("run", run=ids[0])
        if len(chosen) > 1 and st.button("Compare", icon=":material/compare_arrows:", type="primary"):
            go("compare", runs=ids)
        if len(chosen) == 1 and st.button("Pin as baseline", icon=":material/push_pin:"):
            st.query_params["base"] = ids[0]
            st.rerun()
        for action in ("pause", "resume", "cancel", "retry"):
            able = [run for run in chosen if action in run["possible_actions"]]
            if actions.change_button(*ACTIONS[action], possible=bool(able)):
                if action == "cancel":
                    actions.ask("cancel", able)
                actions.act([run["id"] for run in able], action)
                st.rerun()
        if len(chosen) == 1 and actions.change_button(*ACTIONS["clone"]):
            actions.clone(chosen[0])
        ended = [run for run in chosen if "delete" in run["possible_actions"]]
        if actions.change_button("Delete…", ":material/delete:", possible=bool(ended)):
            actions.ask("delete", ended)
        if len(chosen) == 1 and actions.change_button("Edit…", ":material/edit:"):
            actions.ask("edit", chosen[0])
        archived = all(run["archived"] for run in chosen)
        if actions.change_button("Unarchive" if archived else "Archive", ":material/archive:"):
            items = visitor.client().act_on_all(ids, "unarchive" if archived else "archive")
            for problem in filter(None, (item["problem"] for item in items)):
                st.toast(plain(problem["detail"]), icon=":material/error:", duration="long")
            st.rerun()


def _baseline(run: str, listed: list[Json]) -> Json | None:
    """The pinned run, if any."""
    if not run:
        return None
    try:
        return next((item for item in listed if item["id"] == run), None) or visitor.client().run(run)
    except Refused:
        st.caption(f"Baseline run {plain(run)} does not exist. Clear the field *Baseline run*, or pin another run.")
        return None


def _nothing(query: Json, later_page: bool) -> None:
    filtered = any(query[name] for name in ("text", "state", "rule", "tag", "group"))
    if later_page:
        empty("No more runs", "Go back a page.")
    elif filtered:
        empty("No matching runs", "Clear a filter or include archived runs.")
    elif visitor.client().get("/runs", limit=1, archived="any")["items"]:
        empty("All runs are archived", "Check *Include archived* in **More filters, and columns**.")
    else:
        empty(
            "No runs yet",
            "Open **Submit**, select the preset *demo* and press *Submit run*. It trains the embedded policy on this "
            "machine in a few minutes. From a terminal, run `gxpo submit --preset demo`, or `make demo` to compare "
            "the update rules.",
        )
        if st.button("Submit run", type="primary", icon=":material/add_circle:"):
            go("submit")
