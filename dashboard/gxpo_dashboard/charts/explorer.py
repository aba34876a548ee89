"""Any metrics of one or several runs below each other, with one x-axis, legend and pointer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gxpo_dashboard.charts.base import (
    AXES,
    Chart,
    Spec,
    color,
    dash,
    hover_params,
    layer,
    near,
    quantity,
    thinned,
    tooltip,
    typed_frame,
    x_encoding,
    y_encoding,
    zoom_params,
)
from gxpo_dashboard.charts.base import NUMBER as FORM
from gxpo_dashboard.charts.base import axis_value as at_axis
from gxpo_dashboard.view_models.series import Points

_MOST_ROWS, _MOST_LINES = 8, 24
_HEIGHT = 110
_LEGEND = "shown"

Found = Mapping[str, Mapping[str, Points]]
"""Metric → run → points."""


def prefixes(names: Sequence[str]) -> list[str]:
    """`gate/z`, `gate/value`, `time/step_s` → [`gate`, `time`]: the groups of metrics, sorted."""
    return sorted({name.partition("/")[0] for name in names})


def matching(names: Sequence[str], prefix: str, text: str) -> list[str]:
    """Names of a group, all groups for an empty one, that contain every word of `text`."""
    words = text.lower().split()
    return [
        name
        for name in sorted(names)
        if (not prefix or name.partition("/")[0] == prefix) and all(word in name.lower() for word in words)
    ]


def most_rows(num_runs: int) -> int:
    """Metrics of one chart: fewer for many runs, because the browser redraws every line at every refresh."""
    return max(1, min(_MOST_ROWS, _MOST_LINES // max(1, num_runs)))


def explorer_chart(found: Found, runs: Sequence[str], x: str, smoothing: float = 0.0, log: bool = False) -> Chart:
    """One row per metric. A press on a run in the legend hides the others; the pointer marks one x in all rows.

    runs: labels, in the order of the legend. smoothing: weight of the average that `found` holds. log: logarithmic
    axes, without non-positive values.
    """
    rows = []
    for name, series in found.items():
        for label, points in series.items():
            for step, at, value in zip(points.steps, points.x, points.y, strict=True):
                rows.append((name, label, at_axis(at, x), math.nan if log and value <= 0 else value, step))
    frame = typed_frame(rows, metric="str", series="str", x="float64", y="float64", step="int64")
    metrics = list(found)
    last = metrics[-1] if metrics else ""
    lines = [_lines(number) for number in range(len(metrics))]
    nearest = {**hover_params()[0]["select"], "encodings": ["x"]}
    spec: Spec = {
        "vconcat": [_row(name, number, runs, x, log, name == last) for number, name in enumerate(metrics)],
        # One layer of each row: a parameter of two layers of a row is defined twice.
        "params": [
            {**zoom_params()[0], "views": lines},
            {"name": "hover", "select": nearest, "views": [_points(number) for number in range(len(metrics))]},
            {"name": _LEGEND, "select": {"type": "point", "fields": ["series"]}, "bind": "legend", "views": lines},
        ],
        "resolve": {"scale": {"x": "shared"}},
        "spacing": 14,
        # Vega's default, SVG, takes 50 ms longer to redraw twenty lines.
        "usermeta": {"embedOptions": {"renderer": "canvas"}},
        "padding": {"left": 0, "right": 0, "top": 4, "bottom": 4},
    }
    return Chart(
        "explorer",
        "Metrics",
        spec,
        {"points": frame, "near": near(frame, 600)},
        f"{', '.join(metrics)} over {AXES[x]}",
        _words(found),
        _note(smoothing),
        height=70 + (_HEIGHT + 34) * len(metrics),
        labels={"x": AXES[x], "y": "value", "series": "run"},
        thinned=thinned(*(points for series in found.values() for points in series.values())),
    )


def _row(name: str, number: int, runs: Sequence[str], x: str, log: bool, last: bool) -> Spec:
    """A metric's lines, the points under the pointer, and a rule at its x."""
    place_x = x_encoding(x)
    place_x["axis"] = {**place_x["axis"], "labelFlush": True}
    if not last:
        place_x = {**place_x, "title": None, "axis": {**place_x["axis"], "labels": False}}
    y = {**y_encoding(name, FORM, log=log)}
    y["axis"] = {
        **y["axis"],
        "titleAngle": 0,
        "titleAlign": "left",
        "titleAnchor": "end",
        "titleY": -14,
        "titleX": 0,
        "tickCount": 3,
    }
    # Streamlit gives each row the width of the page without its axis: labels are above their grid lines.
    y["axis"] |= {"labelAlign": "left", "labelBaseline": "line-bottom", "labelPadding": -4, "ticks": False}
    chosen: Spec = {"condition": {"param": _LEGEND, "value": 1}, "value": 0.08}
    place = {"x": place_x, "y": y, "color": color(runs)}
    hovered = {"param": "hover", "empty": False}
    only = {"transform": [{"filter": {"field": "metric", "equal": name}}]}
    lines = layer("points", "line", {**place, "strokeDash": dash(runs), "opacity": chosen}, aria=False, strokeWidth=2)
    dots = {**place, "opacity": {"condition": {**hovered, "value": 1}, "value": 0}, "tooltip": tooltip(x, FORM)}
    points = layer("near", "point", dots, aria=False, filled=True, size=50)
    rule = layer("near", "rule", {"x": quantity("x")}, aria=False, strokeWidth=1, color="#7b8794")
    rule["transform"] = [{"filter": {"field": "metric", "equal": name}}, {"filter": hovered}]
    return {
        "height": _HEIGHT,
        "layer": [{**lines, **only, "name": _lines(number)}, {**points, **only, "name": _points(number)}, rule],
    }


def _lines(number: int) -> str:
    return f"lines{number}"


def _points(number: int) -> str:
    return f"points{number}"


def _note(smoothing: float) -> str:
    average = f" Exponential average over all steps, weight {smoothing:g}; gates are never smoothed."
    return "Select a run in the legend to show it alone." + (average if smoothing else "")


def _words(found: Found) -> str:
    if not found:
        return "No data yet."
    num = len({label for series in found.values() for label in series})
    return f"{len(found)} metrics of {num} run{'s' if num != 1 else ''}: {', '.join(found)}."
