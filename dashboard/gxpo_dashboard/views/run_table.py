"""The table of the Runs view: a row per run, or per configuration with means over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.errors import ServiceUnavailable
from gxpo_client.formats import NONE
from gxpo_dashboard.charts.curves import sparkline
from gxpo_dashboard.session import visitor
from gxpo_dashboard.text.labels import STATE_COLORS, STATES
from gxpo_dashboard.view_models.row_selection import RowSelection
from gxpo_dashboard.view_models.series import number
from gxpo_dashboard.view_models.tables import (
    COLUMNS,
    RUNS,
    column_label,
    configurations,
    filled,
    means,
    ordered,
    runs_table,
    written,
)

Json = dict[str, Any]

MOST_GROUPED = 500
"""Runs that are grouped into configurations: their configs are requested at each refresh."""
_TREND_RUNS = 100
"""Runs per request of reward trends."""


def of_runs(runs: list[Json], columns: Sequence[str], baseline: Json | None, page: int) -> list[Json]:
    """Show a row per run; returns the selected runs. page: its number in the list."""
    trends = _trends(runs) if "trend" in columns else {}
    return _show(runs_table(runs, baseline=baseline, trends=trends), [[run] for run in runs], columns, f"runs-{page}")


def of_configurations(runs: list[Json], query: Json, columns: Sequence[str], baseline: Json | None) -> list[Json]:
    """Show a row per configuration, ordered by its mean; returns the selected runs.

    runs: all that match `query`, with the sections of their configs.
    """
    groups = ordered(configurations(runs, sections()), query["sort"], descending=query["order"] == "desc")
    position = {run["id"]: number for number, run in enumerate(runs)}
    frame = runs_table(runs, baseline=baseline)
    frame = means(frame, runs, [[position[run["id"]] for run in members] for members in groups])
    first, *others = columns
    return _show(frame, groups, [first, RUNS, *others], "configurations", means=True)


def sections() -> list[str]:
    """Parts of a config that runs of one configuration share: all but name and seed."""
    found = dict.fromkeys(path.partition(".")[0] for path in visitor.rules().settings)
    if not found:
        raise ServiceUnavailable("the config's schema is not known")
    return [name for name in found if name not in ("name", "seed")]


def _show(
    frame: pd.DataFrame, rows: list[list[Json]], columns: Sequence[str], key: str, *, means: bool = False
) -> list[Json]:
    _place_selection(key, [min(run["id"] for run in members) for members in rows])
    event = st.dataframe(
        frame.style.format(written(frame), na_rep=NONE),
        key=key,
        column_order=filled(frame, columns),
        column_config=_column_config(columns, means),
        hide_index=True,
        row_height=36,
        height=min(38 + 36 * len(rows), 640),
        on_select="rerun",
        selection_mode="multi-row",
        placeholder="–",
        alt="Runs with state, progress, accuracy and cost",
    )
    return [run for row in event.selection.rows if row < len(rows) for run in rows[row]]


def _place_selection(key: str, ids: list[str]) -> None:
    """Select the rows of the table `key` whose items are selected: Streamlit keeps the row numbers in any order.

    A key that depends on the order would select nothing wrong either, but each reordering would make a new grid, which
    loses its scroll position and the widths of its columns.
    """
    selection: RowSelection = st.session_state.setdefault(f"selection-{key}", RowSelection())
    reported: list[int] = []
    if key in st.session_state:
        # By item: what a script sets stays a plain dict until the table is drawn, which a click may prevent.
        reported = sorted(st.session_state[key]["selection"]["rows"])
        selection.report(reported)
    rows = selection.place(ids)
    if rows != reported:
        st.session_state[key] = {"selection": {"rows": rows}}


def _column_config(columns: Sequence[str], means: bool) -> dict[str, Any]:
    column = st.column_config
    labels: dict[str, Any] = {name: column.Column(label) for name, label in COLUMNS.items()}
    labels |= {name: column.Column(column_label(name)) for name in columns if name not in COLUMNS}
    return {
        **labels,
        "name": column.TextColumn("Name", width="medium")
        if means
        else column.LinkColumn("Name", display_text=r"#(.*)$", width="medium", pinned=True),
        "state": column.MultiselectColumn(
            "State", options=list(STATES.values()), color=[STATE_COLORS[state] for state in STATES], width="small"
        ),
        "progress": column.ProgressColumn("Progress", min_value=0, max_value=100, format="%.0f%%", width="small"),
        RUNS: column.TextColumn("Runs", help="Those that succeeded: means are over these.", width="small"),
        "score": column.NumberColumn("Accuracy", help="Latest macro average of pass@1.", width="small"),
        "best": column.NumberColumn("Best", width="small"),
        "reward": column.NumberColumn("Reward", help="Latest mean reward.", width="small"),
        "difference": column.NumberColumn(
            "Δ baseline", help="Percentage points relative to the pinned run.", width="small"
        ),
        "trend": column.LineChartColumn("Trend", help="Reward so far, each on its own scale.", width="small"),
        "passes": column.TextColumn("Backward passes", help="Backward passes, of the budget.", width="small"),
        "left": column.TextColumn("Time left", help="Estimated from the pace so far.", width="small"),
        "tags": column.ListColumn("Tags", width="small"),
    }


def _trends(runs: Sequence[Json]) -> dict[str, list[float]]:
    """Rewards of each run; requested again only when a run has changed."""
    store: dict[str, tuple[Any, list[float]]] = st.session_state.setdefault("trends", {})
    stale = [run for run in runs if store.get(run["id"], (None,))[0] != (run["attempt"], run["progress"]["steps"])]
    for start in range(0, len(stale), _TREND_RUNS):
        part = stale[start : start + _TREND_RUNS]
        found = visitor.client().metrics_of([run["id"] for run in part], ["reward/mean"], "step", None, 40)
        for run in part:
            entry = found.get(run["id"], {}).get("series", {}).get("reward/mean") or {"y": []}
            values = [value for value in map(number, entry["y"]) if value == value]
            store[run["id"]] = ((run["attempt"], run["progress"]["steps"]), sparkline(values))
    while len(store) > 1000:
        store.pop(next(iter(store)))
    return {run["id"]: store[run["id"]][1] for run in runs if run["id"] in store}
