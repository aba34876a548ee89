"""Backward passes, split into look-ahead and fallback steps, compared with the other rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from gxpo_dashboard.charts.base import (
    AXES,
    DASHES,
    MUTED,
    NUMBER,
    Chart,
    Spec,
    hover_params,
    labels_frame,
    legend,
    x_encoding,
    zoom_params,
)
from gxpo_dashboard.charts.gate import FALLBACK, LOOK_AHEAD
from gxpo_dashboard.text.formats import count, known
from gxpo_dashboard.view_models.series import Series

NAMES = ("update/backward_passes", "update/backward_passes_total")
PLAIN = "GRPO steps"
AREA_COLORS = ("#3c7dba", "#9aa5b1")
DEFAULT_SFPO_K = 3
"""K of SFPO if the run's rule has none (the authors' setting)."""


def passes_by_phase(series: Series, rule: str) -> pd.DataFrame:
    """Rows (step, series, y): cumulative backward passes per phase, summing to the total.

    The phase of a step is `gate/active` after the step before. Between thinned points, all backward passes count
    towards the phase at their end.
    """
    total, active = series.get("update/backward_passes_total"), series.get("gate/active")
    after = dict(zip(active.steps, active.y, strict=True)) if active else {}
    rows: list[tuple[int, str, float]] = []
    spent = {LOOK_AHEAD: 0.0, FALLBACK: 0.0}
    before, on = 0.0, True
    for step, value in zip(total.steps, total.y, strict=True) if total else ():
        if not known(value):
            continue
        spent[LOOK_AHEAD if on else FALLBACK] += value - before
        before, on = value, bool(after.get(step, on))
        if rule == "grpo":
            rows.append((step, PLAIN, value))
        else:
            rows += [(step, LOOK_AHEAD, spent[LOOK_AHEAD]), (step, FALLBACK, spent[FALLBACK])]
    return pd.DataFrame(rows, columns=["x", "series", "y"]).astype({"x": "float64", "series": "str", "y": "float64"})


def others(steps: list[int], rule: Mapping[str, Any]) -> pd.DataFrame:
    """Rows (x, series, y): backward passes of the other rules on the same steps with open gates."""
    costs = {name: cost for name, cost in _costs(rule).items() if name.split(" ")[0].lower() != rule.get("name")}
    rows = [(float(step), name, float(cost * step)) for name, cost in costs.items() for step in steps]
    return pd.DataFrame(rows, columns=["x", "series", "y"]).astype({"x": "float64", "series": "str", "y": "float64"})


def budget_chart(series: Series, rule: Mapping[str, Any], budget: float | None) -> Chart:
    """Stacked area of the run's backward passes, lines of the other rules, a rule at the budget."""
    name = str(rule.get("name", "grpo"))
    own = passes_by_phase(series, name)
    steps = sorted({int(step) for step in own["x"]})
    hypothetical = others([0, *steps] if steps else [], rule)
    stacked = [PLAIN] if name == "grpo" else [LOOK_AHEAD, FALLBACK]
    styles = _styles(stacked, list(dict.fromkeys(hypothetical["series"])))
    limit = labels_frame([(budget, f"budget {count(budget)}")] if budget else [])
    spec: Spec = {"layer": [_area(styles), *_lines(styles), *_limit()]}
    table = pd.concat([own, hypothetical[hypothetical["x"] > 0]], ignore_index=True)
    datasets = {
        "points": table,
        "own": own,
        "others": hypothetical,
        "limit": limit,
    }
    return Chart(
        "budget",
        "Backward passes",
        spec,
        datasets,
        f"Backward passes over {AXES['step']} by phase, compared with other rules",
        _words(own, hypothetical, budget),
        "Areas: this run. Lines: other rules on the same steps with open gates.",
        labels={"x": AXES["step"]},
    )


def _costs(rule: Mapping[str, Any]) -> dict[str, int]:
    """Backward passes per step of each rule; with this run's K if it has one."""
    k = int(rule.get("k") or DEFAULT_SFPO_K)
    probes = int(rule.get("probes") or 2)
    return {
        "GRPO (1 per step)": 1,
        f"SFPO K={k} ({k + 1} per step)": k + 1,
        f"GXPO ({probes + 1} per step)": probes + 1,
    }


def _y() -> Spec:
    axis = {"format": "~s", "tickCount": 5, "titlePadding": 8, "labelFlush": False}
    return {
        "field": "y",
        "type": "quantitative",
        "title": "backward passes",
        "axis": axis,
        "scale": {"padding": 18, "nice": False},
    }


def _styles(areas: list[str], lines: list[str]) -> Spec:
    """One colour and dash per name, areas and lines in one legend."""
    names = [*areas, *lines]
    colors = [*AREA_COLORS[: len(areas)], *[MUTED] * len(lines)]
    dashes = [[1, 0]] * len(areas) + [list(DASHES[i + 1]) for i in range(len(lines))]
    shared: Spec = {"field": "series", "type": "nominal", "legend": legend(names), "sort": None}
    return {
        "color": {**shared, "scale": {"domain": names, "range": colors}},
        "strokeDash": {**shared, "scale": {"domain": names, "range": dashes}},
    }


def _area(styles: Spec) -> Spec:
    order = {"condition": [{"test": f"datum.series === '{FALLBACK}'", "value": 1}], "value": 0}
    y = {**_y(), "stack": "zero"}
    return {
        "data": {"name": "own"},
        "mark": {"type": "area", "opacity": 0.6},
        "params": zoom_params(),
        "encoding": {"x": x_encoding("step"), "y": y, "order": order, "color": styles["color"]},
    }


def _lines(styles: Spec) -> list[Spec]:
    line: Spec = {
        "data": {"name": "others"},
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {"x": x_encoding("step"), "y": _y(), **styles},
    }
    tips = [{"field": "series"}, {"field": "x", "title": "step"}, {"field": "y", "title": "passes", "format": NUMBER}]
    dots: Spec = {
        "data": {"name": "points"},
        "mark": {"type": "point", "filled": True, "size": 45, "color": MUTED},
        "params": hover_params(),
        "encoding": {
            "x": x_encoding("step"),
            "y": _y(),
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": tips,
        },
    }
    return [line, dots]


def _limit() -> list[Spec]:
    y: Spec = {"field": "y", "type": "quantitative"}
    return [
        {
            "data": {"name": "limit"},
            "mark": {"type": "rule", "aria": False, "strokeWidth": 2, "color": MUTED},
            "encoding": {"y": y},
        },
        {
            "data": {"name": "limit"},
            "mark": {
                "type": "text",
                "aria": False,
                "align": "left",
                "baseline": "bottom",
                "dx": 4,
                "dy": -2,
                "color": MUTED,
            },
            "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "label"}},
        },
    ]


def _words(own: pd.DataFrame, hypothetical: pd.DataFrame, budget: float | None) -> str:
    if own.empty:
        return "No steps yet."
    newest = own["x"].max()
    spent = own[own["x"] == newest].set_index("series")["y"]
    parts = ", ".join(f"{count(value)} in {name}" for name, value in spent.items() if value)
    other = hypothetical[hypothetical["x"] == newest].set_index("series")["y"]
    compared = ", ".join(f"{name}: {count(value)}" for name, value in other.items())
    of = f" of {count(budget)}" if budget else ""
    return f"{count(float(spent.sum()))} backward passes{of} after {count(newest)} steps ({parts}). Others: {compared}."
