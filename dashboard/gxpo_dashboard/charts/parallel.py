"""Parallel coordinates of a sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_client.formats import known, percent
from gxpo_dashboard.charts.base import TEXT, Chart, Spec, layer, quantity, typed_frame
from gxpo_dashboard.view_models.series import number

LINES = ("#8fbbe3", "#1d5a9e")
_LABEL: Spec = {"aria": False, "align": "left", "dx": 8, "fontSize": 12}
_BACKGROUND: Spec = {"expr": "background"}
"""The colour behind a chart, which depends on the page's mode: Streamlit sets it, and Vega has it as a signal."""


def parallel_chart(runs: Sequence[Mapping[str, Any]], settings: Sequence[str], measure: str = "accuracy") -> Chart:
    """Parallel coordinates of a sweep: an axis per setting and one of the runs' `score`, a line per run.

    settings: dotted paths of `group_values`. measure: name of the score, a share. Values are placed by rank, so that
    1e-5 and 1e-4 are as far apart as 1e-4 and 1e-3.
    """
    scored = [run for run in runs if known(number(run["score"]))]
    axes = [*settings, measure]
    values = {
        path: sorted({setting_text(run["group_values"].get(path)) for run in scored}, key=_numeric_first)
        for path in settings
    }
    scores = [number(run["score"]) for run in scored]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    rows, ticks = [], []
    for run in scored:
        score = number(run["score"])
        for axis in axes:
            word = percent(score) if axis == measure else setting_text(run["group_values"].get(axis))
            place = (score - low) / (high - low or 1.0) if axis == measure else _rank(word, values[axis])
            rows.append((run["name"], axis, place, word, score))
    for axis in settings:
        ticks += [(axis, _rank(word, values[axis]), word) for word in values[axis]]
    ticks += [(measure, 0.0, percent(low)), (measure, 1.0, percent(high))] if scored else []
    frame = typed_frame(rows, series="str", axis="str", y="float64", value="str", accuracy="float64")
    x: Spec = {"field": "axis", "type": "nominal", "sort": axes, "title": None}
    x |= {"axis": {"labelAngle": 0, "labelLimit": 300}, "scale": {"padding": 0.3}}
    shade = quantity("accuracy", legend=None, scale={"zero": False, "range": list(LINES)})
    tips = [{"field": "series"}, {"field": "axis"}, {"field": "value"}]
    hovered: Spec = {"condition": {"param": "hover", "empty": False, "value": 4}, "value": 1.6}
    place_line = {
        "x": x,
        "y": quantity(axis=None, scale={"padding": 14}),
        "color": shade,
        "detail": {"field": "series"},
    }
    select = {"type": "point", "fields": ["series"], "on": "pointerover", "nearest": True, "clear": "pointerout"}
    # Lines cross the labels, so that each has a halo below it.
    words = {"x": x, "y": quantity(), "text": {"field": "value"}}
    best = max(scored, key=lambda run: number(run["score"]), default=None)
    return Chart(
        "parallel",
        "Parallel coordinates",
        {
            "layer": [
                layer("points", "line", {**place_line, "size": hovered}, aria=False, opacity=0.8),
                layer(
                    "points", "point", {**place_line, "tooltip": tips}, params=[{"name": "hover", "select": select}],
                    filled=True, size=40,
                ),
                layer("ticks", "text", words, **_LABEL, stroke=_BACKGROUND, strokeWidth=5, strokeJoin="round"),
                layer("ticks", "text", words, **_LABEL, color=TEXT),
            ]
        },
        {"points": frame, "ticks": typed_frame(ticks, axis="str", y="float64", value="str")},
        f"A line per run over {', '.join(axes)}",
        f"Highest: {percent(number(best['score']))} in {best['name']}." if best else "No evaluations yet.",
        "Darker lines have a higher score. Values of a setting are evenly spaced.",
        zoomable=False,
        height=360,
    )  # fmt: skip


def _rank(word: str, values: Sequence[str]) -> float:
    return values.index(word) / (len(values) - 1) if len(values) > 1 else 0.5


def _numeric_first(word: str) -> tuple[bool, float, str]:
    value = number(word)
    return (not known(value), value if known(value) else 0.0, word)


def setting_text(value: Any) -> str:
    """A value of a setting as a label."""
    return value if isinstance(value, str) else json.dumps(value)
