"""Runs view: list, filter and control runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from gxpo_client.client import Client
from gxpo_client.errors import Refused, ServiceError
from gxpo_client.formats import count
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.session.navigation import go
from gxpo_dashboard.text.labels import ACTIONS, STATES, comma_separated, number_of, plain, state_chip
from gxpo_dashboard.view_models.tables import (
    COLUMNS,
    METRIC,
    SETTING,
    SHOWN,
    column_label,
    further,
)
from gxpo_dashboard.views import actions, run_table
from gxpo_dashboard.widgets.pages import cursors, pager
from gxpo_dashboard.widgets.shown import empty, live

Json = dict[str, Any]

SORTS = {
    "created_at": "newest",
    "updated_at": "last changed",
    "name": "name",
    "state": "state",
    "score": "accuracy",
    "score_best": "best accuracy",
    "backward_passes": "backward passes",
    "step": "steps",
    "metric:reward/mean": "reward",
    "metric:policy/entropy": "entropy",
    "metric:rollout/logprob_gap_mean": "log-prob gap",
}
PAGE_SIZES = ("25", "50", "100", "200")
_METRIC_RUNS = 50
_METRIC_COLUMNS_S = 30.0
"""Time until the metrics that are offered as columns are requested again."""


def show() -> None:
    header = st.container(horizontal=True, vertical_alignment="center", gap="small")
    header.title("Runs", width="content")
    actions.dialogs()
    with header:
        _views()
        seeds = permalinks.choice("Rows", "rows", list(_ROWS), "runs", format_func=_ROWS.__getitem__) == "seeds"
    query, columns, baseline = _filters()
    query["with_metric"] = further(columns, METRIC)
    query["with_setting"] = further(columns, SETTING)
    live(lambda: (_configurations if seeds else _list)(query, columns, baseline), visitor.LIVE_S + 1)


def _views() -> None:
    """Views of the table; each is an address."""
    with st.popover("Views", icon=":material/bookmark:"):
        for label, view in _SAVED.items():
            if st.button(label, type="tertiary", key=f"saved-{label}"):
                go("runs", **view)
        st.caption("Filters, columns and order are in the address: bookmark it to save a view of your own.")


def _filters() -> tuple[Json, list[str], str]:
    """Filters, order and columns, all in the URL."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = permalinks.text("Search", "text", placeholder="name, notes, tag, model, id", icon=":material/search:")
        states = permalinks.multi("State", "state", list(STATES), format_func=STATES.__getitem__, placeholder="any")
        rules = visitor.rules()
        # The rule in the URL is kept while the service does not answer.
        names = ["", *(rules.names or st.query_params.get_all("rule"))]
        rule = permalinks.select(
            "Rule", "rule", names, "", format_func=lambda name: rules.label(name) if name else "any"
        )
        sort = permalinks.select("Sort by", "sort", list(SORTS), "created_at", format_func=SORTS.__getitem__)
        order = permalinks.select("Order", "order", ["desc", "asc"], "desc", format_func=_ORDER.__getitem__)
    with st.expander("More filters and columns", icon=":material/tune:"):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            model = permalinks.text("Model", "model", placeholder="exact model.path")
            tags = permalinks.text("Tags", "tag", placeholder="all of these, comma-separated")
            group = permalinks.text("Group", "group", placeholder="group id")
            baseline = permalinks.text("Baseline run", "base", placeholder="run id, or pin one below")
            size = permalinks.select("Page size", "size", PAGE_SIZES, "50") or "50"
        columns = permalinks.multi("Columns", "cols", _offered(), SHOWN, format_func=column_label)
        archived = permalinks.check("Include archived", "archived")
    query = {
        "text": text,
        "state": states,
        "rule": rule,
        "sort": sort,
        "order": order,
        "model": model,
        "tag": comma_separated(tags),
        "group": group,
        "limit": int(size),
        "archived": "any" if archived else "false",
    }
    return query, columns or list(SHOWN), baseline


_ORDER = {"desc": "descending", "asc": "ascending"}
_ROWS = {"runs": "Runs", "seeds": "Means over seeds"}
_SAVED: dict[str, Json] = {
    "All runs": {},
    "Active": {"state": ["queued", "starting", "running", "recovering", "pausing"]},
    "Failed": {"state": ["failed"], "cols": ["name", "state", "rule", "reason", "step", "created", "tags"]},
    "Most accurate": {"sort": "score_best"},
    "Most accurate configurations": {"sort": "score_best", "rows": "seeds"},
}


def _offered() -> list[str]:
    """All columns: those of every run, settings, metrics of recent runs, and those in the URL."""
    metrics: list[str] = []
    with suppress(ServiceError):
        metrics = _metric_columns(visitor.service_url(), visitor.client())
    settings = [SETTING + path for path in visitor.rules().settings]
    return list(dict.fromkeys([*COLUMNS, *settings, *metrics, *st.query_params.get_all("cols")]))


@st.cache_data(ttl=_METRIC_COLUMNS_S, max_entries=4, show_spinner=False)
def _metric_columns(url: str, _service: Client) -> list[str]:
    """Metrics of the newest run of each rule, among the newest runs that have metrics."""
    recent = _service.runs(limit=_METRIC_RUNS, state=["running", "succeeded"])["items"]
    newest = {run["rule"]: run["id"] for run in reversed(recent)}
    return list(dict.fromkeys(METRIC + name for run in newest.values() for name in _service.metric_names(run)))


def _configurations(query: Json, columns: Sequence[str], baseline_id: str) -> None:
    """A row per configuration, over all pages of runs."""
    with visitor.guarded():
        asked = {name: value for name, value in query.items() if name != "limit"}
        asked["with_setting"] = [*query["with_setting"], *run_table.sections()]
        runs = visitor.client().all_runs(limit=run_table.MOST_GROUPED + 1, **asked)
        if not runs:
            _nothing(query, later_page=False)
            return
        if len(runs) > run_table.MOST_GROUPED:
            runs = runs[: run_table.MOST_GROUPED]
            st.warning(f"Means over the first {len(runs)} runs only. Narrow the filters to include all runs.")
        baseline = _baseline(baseline_id, runs)
        _summary(runs, None)
        _bar(run_table.of_configurations(runs, query, columns, baseline), baseline)


def _list(query: Json, columns: Sequence[str], baseline_id: str) -> None:
    with visitor.guarded():
        visited = cursors("runs", query)
        answer = visitor.client().runs(**query, cursor=visited[-1] if visited else None)
        if answer["total"] is not None:
            st.session_state["runs_total"] = answer["total"]
        if not answer["items"]:
            _nothing(query, bool(visited))
        else:
            baseline = _baseline(baseline_id, answer["items"])
            _summary(answer["items"], st.session_state.get("runs_total"))
            _bar(run_table.of_runs(answer["items"], columns, baseline, len(visited)), baseline)
        if visited or answer["next_cursor"]:
            total = st.session_state.get("runs_total")
            of = f" of {count(total)}" if total is not None else ""
            first = len(visited) * query["limit"]
            pager("runs", visited, answer["next_cursor"], first, len(answer["items"]), of)


def _summary(runs: list[Json], total: int | None) -> None:
    """How many runs the filters leave, and the states of those on this page."""
    states = [run["state"] for run in runs]
    chips = [f"{states.count(state)} {state_chip(state)}" for state in STATES if state in states]
    here = "; on this page" if total is not None and total > len(runs) else ""
    st.markdown(" ".join([f"**{number_of(total or len(runs), 'run')}**{here}", *chips]))


def _bar(chosen: list[Json], baseline: Json | None) -> None:
    """Actions on the selected runs."""
    names = ", ".join(plain(run["name"]) for run in chosen[:4]) + (" …" if len(chosen) > 4 else "")
    ids = [run["id"] for run in chosen]
    st.markdown(f"**{len(chosen)} selected** {names}" if chosen else "Select rows to act on them.")
    if not chosen:
        if baseline is not None:
            st.caption(f"Baseline: {plain(baseline['name'])}")
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        if st.button("Open", icon=":material/monitoring:", disabled=len(ids) != 1):
            go("run", run=ids[0])
        if st.button("Compare", icon=":material/compare_arrows:", type="primary", disabled=len(ids) < 2):
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
                st.rerun(scope="fragment")
        if len(chosen) == 1 and actions.change_button("Clone…", ACTIONS["clone"][1]):
            actions.ask("clone", chosen[0])
        ended = [run for run in chosen if "delete" in run["possible_actions"]]
        if actions.change_button("Delete…", ":material/delete:", possible=bool(ended)):
            actions.ask("delete", ended)
        if len(chosen) == 1 and actions.change_button("Edit…", ":material/edit:"):
            actions.ask("edit", chosen[0])
        away = all(run["archived"] for run in chosen)
        if actions.change_button("Unarchive" if away else "Archive", ":material/archive:"):
            actions.archive(chosen, not away)
            st.rerun(scope="fragment")
        with st.popover("Tag…", icon=":material/label:", disabled=not visitor.may_change()):
            word = st.text_input("Tag", key="tag-word", max_chars=60)
            if st.button("Add tag", disabled=not word.strip()):
                actions.tag_runs(chosen, word.strip())
                st.rerun(scope="fragment")


def _baseline(run: str, listed: list[Json]) -> Json | None:
    """The pinned run, if any."""
    if not run:
        return None
    found = next((item for item in listed if item["id"] == run), None)
    try:
        return found or visitor.client().run(run)
    except Refused:
        st.caption(f"Baseline run {plain(run)} does not exist. Clear the field *Baseline run*, or pin another run.")
        return None


def _nothing(query: Json, later_page: bool) -> None:
    filtered = any(query[name] for name in ("text", "state", "rule", "model", "tag", "group"))
    if later_page:
        empty("No more runs", "Go back a page.")
    elif filtered:
        empty("No matching runs", "Clear a filter or include archived runs.")
    else:
        empty(
            "No runs yet",
            "Open **Submit**, select the preset *demo* and press *Submit run*. It trains the embedded policy on this "
            "machine in a few minutes. From a terminal, run `gxpo submit --preset demo`, or `make demo` to compare "
            "the update rules.",
        )
        if st.button("Submit run", type="primary", icon=":material/add_circle:"):
            go("submit")
