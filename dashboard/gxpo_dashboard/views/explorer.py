"""Metric explorer of the Run and Compare views, and the selection of runs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import streamlit as st

from gxpo_client.errors import InvalidRequest, NotFound
from gxpo_client.formats import count, figure, percent, size
from gxpo_dashboard.charts.base import NUMBER, SHARE, Plot, height_with_legend, metric_chart, with_colors
from gxpo_dashboard.charts.curves import matching
from gxpo_dashboard.labels import plain, unique_labels
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models.series import Points
from gxpo_dashboard.views import records
from gxpo_dashboard.widgets import chart, empty, grid

Json = dict[str, Any]

_MOST_CHARTS, _MOST_LINES = 8, 24
"""The browser redraws every line at every refresh."""
_HEIGHT = 220


def show(runs: Mapping[str, Json], x: str, *, aligned: bool = False) -> None:
    """Controls and chart; runs by id. aligned: steps are counted from the end of a warm start."""
    names = sorted({name for run in runs for name in visitor.client().metric_names(run)})
    if not names:
        if len(runs) == 1:
            records.none(next(iter(runs)), "metrics")
        else:
            empty("No metrics yet", "None of the runs has reported a step.")
        return
    groups = sorted({name.partition("/")[0] for name in names})
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = permalinks.text("Search metrics", "find", placeholder="reward, norm, …", icon=":material/search:")
        log = permalinks.check("Logarithmic", "logarithmic")
    default = "reward" if "reward" in groups else groups[0]
    prefix = permalinks.choice("Group", "prefix", {"": "all"} | {group: plain(group) for group in groups}, default)
    # Words of a search are looked for in every group.
    matches = matching(names, "" if text else prefix, text)
    if not matches:
        st.caption("No matching metrics. Change the search.")
        return
    most = max(1, min(_MOST_CHARTS, _MOST_LINES // len(runs)))
    if len(matches) > most:
        st.caption(f"Showing {most} of {len(matches)} metrics. Search for others, or select fewer runs to show more.")
    draw(runs, tuple(matches[:most]), x, aligned=aligned, log=log)


def draw(
    runs: Mapping[str, Json],
    names: tuple[str, ...],
    x: str,
    *,
    aligned: bool = False,
    log: bool = False,
    columns: int = 2,
) -> None:
    """A chart of each metric with a line per run."""
    warm = {run: view["warm_steps"] if aligned else 0 for run, view in runs.items()}
    note = "Steps are counted from the end of a warm start." if any(warm.values()) else ""
    labels = unique_labels(runs)
    live = visitor.live_series_of(runs, x, names, aligned=aligned)
    colors = visitor.rules().colors({labels[run]: view["rule"] for run, view in runs.items()})
    height = height_with_legend([labels[run] for run in runs], _HEIGHT)

    def draw_metric(name: str) -> None:
        unit, form, say = next((shown for end, shown in _UNITS.items() if name.endswith(end)), _PLAIN)
        lines = {run: labels[run] for run in runs}
        plot = Plot(f"explorer-{name}", name, lines, unit, form, log=log, say=say, note=note)
        series = {run: of_run.points.get(name, Points()).without(warm[run], x) for run, of_run in live.items()}
        chart(replace(with_colors(metric_chart(plot, series, x), colors), height=height), "metric")

    grid(names, draw_metric, columns)


_Shown = tuple[str, str, Callable[[float], str]]
_PLAIN: _Shown = "value", NUMBER, figure
_UNITS: dict[str, _Shown] = {"_bytes": ("bytes", ".3~s", size), "_fraction": ("fraction", SHARE, percent)}
"""By the end of a metric's name: title of its axis, and the format of its values there and in the summary."""
_RECENT = 100


def with_selected(offered: Mapping[str, Json], name: str, path: str) -> dict[str, Json]:
    """What is offered, by id, and what the URL or the `multi` of this name has selected. path: of the collection."""
    offered = dict(offered)
    for id in dict.fromkeys((*st.query_params.get_all(name), *st.session_state.get(f"in_{name}", []))):
        if id not in offered:
            try:
                offered[id] = visitor.client().get(path, id)
            except (InvalidRequest, NotFound):
                st.caption(f"A {path[1:-1]} in the URL no longer exists.")
    return offered


def runs(label: str, name: str, *, most: int) -> dict[str, Json]:
    """The selected runs by id, in order. Options: recent runs, search results and selected runs; the URL has ids."""
    requested = st.query_params.get_all(name)
    if len(requested) > most:
        st.query_params[name] = requested[:most]  # Streamlit raises an error for more values than a widget allows
        words = f"Showing the first {most} of {count(len(requested))} runs."
        st.toast(words, icon=":material/filter_list:", duration="infinite")
    text = st.session_state.get(f"search-{name}", "").strip()
    recent = visitor.client().get("/runs", limit=_RECENT, text=text, archived="any")["items"]
    offered = with_selected({run["id"]: run for run in recent}, name, "/runs")
    names = unique_labels(offered)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = permalinks.multi(label, name, names, max_selections=most, placeholder="by name")
        st.text_input(
            "Search runs", key=f"search-{name}", placeholder="name, tag, id", width=220, icon=":material/search:",
            max_chars=200,
        )  # fmt: skip
    return {run: offered[run] for run in chosen if run in offered}
