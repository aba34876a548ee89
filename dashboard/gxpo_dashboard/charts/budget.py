"""Backward passes, split into look-ahead and fallback steps, compared with the other rules of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from gxpo_client.formats import count, known
from gxpo_dashboard.charts.base import (
    AXES,
    DASHES,
    MUTED,
    NUMBER,
    TEXT,
    Chart,
    Spec,
    by_series,
    hover_params,
    labels_frame,
    layer,
    legend,
    on_hover,
    quantity,
    thinned,
    typed_frame,
    x_encoding,
    zoom_params,
)
from gxpo_dashboard.charts.gate import FALLBACK, LOOK_AHEAD
from gxpo_dashboard.view_models.rules import Rule, Rules
from gxpo_dashboard.view_models.series import Series

NAMES = ("update/backward_passes", "update/backward_passes_total")


def passes_by_phase(series: Series, rule: Rule) -> pd.DataFrame:
    """Rows (step, series, y): cumulative backward passes per phase, summing to the total. One phase without a gate.

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
        if rule.watched is None:
            rows.append((step, _phases(rule)[0], value))
        else:
            rows += [(step, LOOK_AHEAD, spent[LOOK_AHEAD]), (step, FALLBACK, spent[FALLBACK])]
    return typed_frame(rows, x="float64", series="str", y="float64")


def others(steps: list[int], settings: Mapping[str, Any], rules: Rules) -> pd.DataFrame:
    """Rows (x, series, y): backward passes of the other rules on the same steps with open gates.

    With the settings of the run where the rule has them, and its defaults elsewhere.
    """
    rows = [
        (float(step), rule.label_with_cost(settings), float(rule.passes_per_step(settings) * step))
        for rule in _other_rules(settings, rules)
        for step in steps
    ]
    return typed_frame(rows, x="float64", series="str", y="float64")


def budget_chart(series: Series, settings: Mapping[str, Any], budget: float | None, rules: Rules) -> Chart:
    """Stacked area of the run's backward passes, lines of the other rules, a rule at the budget.

    settings: the run's `learner.rule`.
    """
    rule = rules.of(settings)
    own = passes_by_phase(series, rule)
    steps = sorted({int(step) for step in own["x"]})
    hypothetical = others([0, *steps] if steps else [], settings, rules)
    lines = {other.label_with_cost(settings): other for other in _other_rules(settings, rules)} if steps else {}
    styles = _styles(_phases(rule), (rule.color, rules.fallback_color), lines)
    limit = labels_frame([(budget, f"budget {count(budget)}")] if budget else [])
    table = pd.concat([own, hypothetical[hypothetical["x"] > 0]], ignore_index=True)
    return Chart(
        "budget",
        "Backward passes",
        {"layer": [_area(styles), *_lines(styles), *_limit()]},
        {"points": table, "own": own, "others": hypothetical, "limit": limit},
        f"Backward passes over {AXES['step']} by phase, compared with other rules",
        _words(own, hypothetical, budget),
        "Areas: this run. Lines: other rules on the same steps with open gates.",
        labels={"x": AXES["step"]},
        thinned=thinned(series.get("update/backward_passes_total")),
    )


def _other_rules(settings: Mapping[str, Any], rules: Rules) -> list[Rule]:
    return [rule for rule in rules.known if rule.name != settings.get("name") and rule.family != "control"]


def _phases(rule: Rule) -> list[str]:
    return [f"{rule.label} steps"] if rule.watched is None else [LOOK_AHEAD, FALLBACK]


def _y(**more: Any) -> Spec:
    axis = {"format": "~s", "tickCount": 5, "titlePadding": 8, "labelFlush": False}
    return quantity(title="backward passes", axis=axis, scale={"padding": 18, "nice": False}, **more)


def _styles(areas: list[str], area_colors: tuple[str, str], lines: Mapping[str, Rule]) -> Spec:
    """One colour and dash per name, areas and lines in one legend; those of a rule are the same for every run."""
    names = [*areas, *lines]
    colors = [*area_colors[: len(areas)], *(rule.color for rule in lines.values())]
    dashed = DASHES[1:]
    dashes = [[1, 0]] * len(areas) + [list(dashed[rule.position % len(dashed)]) for rule in lines.values()]
    shown = legend(names)
    return {"color": by_series(shown, names, range=colors), "strokeDash": by_series(shown, names, range=dashes)}


def _area(styles: Spec) -> Spec:
    order = {"condition": [{"test": f"datum.series === '{FALLBACK}'", "value": 1}], "value": 0}
    encoding = {"x": x_encoding("step"), "y": _y(stack="zero"), "order": order, "color": styles["color"]}
    return layer("own", "area", encoding, params=zoom_params(), opacity=0.6)


def _lines(styles: Spec) -> list[Spec]:
    place = {"x": x_encoding("step"), "y": _y()}
    tips = [
        {"field": "series"},
        {"field": "x", "title": "step"},
        {"field": "y", "title": "backward passes", "format": NUMBER},
    ]
    dots = {**place, "opacity": on_hover(0), "tooltip": tips}
    return [
        layer("others", "line", {**place, **styles}, strokeWidth=2),
        layer("points", "point", dots, params=hover_params(), filled=True, size=45, color=MUTED),
    ]


def _limit() -> list[Spec]:
    words = {"y": quantity(), "x": {"value": 0}, "text": {"field": "label"}}
    place: Spec = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    return [
        layer("limit", "rule", {"y": quantity()}, aria=False, strokeWidth=2, color=MUTED),
        layer("limit", "text", words, aria=False, color=TEXT, **place),
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
    words = f"{count(float(spent.sum()))} backward passes{of} after {count(newest)} steps ({parts})."
    return f"{words} Others: {compared}." if compared else words
