"""Timeline of a run's processes over the last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gxpo_client.formats import percent
from gxpo_dashboard.charts.base import Chart, Spec, by_series, layer, metric_chart, quantity, typed_frame, zoom_params
from gxpo_dashboard.view_models.series import Series

ACTIVITIES = ("sampling", "verifying", "updating", "syncing", "saving")
OVERLAP = {
    "time/overlap_fraction": "sampling and update overlap",
    "time/engine_idle_fraction": "engines idle",
    "time/learner_idle_fraction": "learner idle",
}
STALENESS = {"rollout/staleness_mean": "mean", "rollout/staleness_max": "maximum"}
NAMES = (*OVERLAP, *STALENESS)
_ROW = 28
"""Height of a process in pixels."""


def spans_frame(steps: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows (process, series, x, x2, step): activities in seconds since the first step began."""
    origin = steps[0]["begin"] if steps else 0.0
    rows = []
    for step in steps:
        shift = step["begin"] - origin
        rows += [
            (span["process"], span["activity"], shift + span["begin"], shift + span["end"], step["step"])
            for span in step["spans"]
        ]
    return typed_frame(rows, process="str", series="str", x="float64", x2="float64", step="int64")


def timeline_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """One row per process; a gap is idle time."""
    frame = spans_frame(steps)
    processes = sorted(set(frame["process"]), key=lambda name: (not name.startswith("learner"), len(name), name))
    encoding: Spec = {
        "x": quantity("x", title="seconds", axis={"grid": False, "tickCount": 8}, scale={"nice": False}),
        "x2": {"field": "x2"},
        "y": {"field": "process", "type": "nominal", "sort": processes, "title": None},
        "fill": by_series({"orient": "top", "title": None, "symbolType": "square", "columns": 5}, ACTIVITIES),
        "tooltip": [{"field": name} for name in ("process", "series", "step", "x", "x2")],
    }
    bars = layer("points", "bar", encoding, params=zoom_params(), height={"band": 0.8})
    return Chart(
        "timeline",
        "Timeline",
        {"layer": [bars]},
        {"points": frame},
        "Sampling, verifying, updating and syncing of each process over the last steps",
        _words(frame),
        "A gap is idle time. With rollout.async_depth ≥ 1 engines sample while the learner updates.",
        height=120 + _ROW * len(processes),
        labels={"series": "activity", "x": "begin (s)", "x2": "end (s)"},
    )


def overlap_charts(series: Series, x: str) -> list[Chart]:
    """Overlap, idle time and staleness; metrics that the run does not report are omitted."""
    charts = [
        metric_chart("overlap", "Overlap and idle time", series, OVERLAP, x=x, y_title="fraction", form=".0%",
                     zero=True, say=percent, note="Overlap as a share of the shorter of sampling and update."),
        metric_chart("staleness", "Staleness of samples", series, STALENESS, x=x, y_title="versions", zero=True),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def _words(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "No timeline yet."
    length = float(frame["x2"].max() - frame["x"].min())
    busy = (frame["x2"] - frame["x"]).groupby(frame["process"]).sum()
    shares = ", ".join(f"{name} {100 * seconds / length:.0f}%" for name, seconds in busy.items())
    return f"Busy over the last {frame['step'].nunique()} steps: {shares}."
