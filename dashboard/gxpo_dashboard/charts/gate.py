"""Gate charts: z-score with threshold τ, and the monitored value with its window.

The z-score is never smoothed: a single step above τ fires the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from gxpo_client.formats import count, figure, known
from gxpo_dashboard.charts import base
from gxpo_dashboard.charts.base import Chart, Spec
from gxpo_dashboard.view_models.rules import HUES
from gxpo_dashboard.view_models.series import Points, Series

METRICS = tuple(f"gate/{name}" for name in ("active", "z", "threshold", "value", "shutoff_step"))
WINDOW = ("gate/mean", "gate/std")
"""Requested as joined series: both bounds of the band need both."""
LOOK_AHEAD, FALLBACK = "look-ahead on", "fallback to GRPO"
PHASE_OPACITY = 0.22
"""Visible on light and dark pages: tests measure it."""


def shutoff_step(series: Series) -> int | None:
    """The step at which the gate fired, if any."""
    steps = series.get("gate/shutoff_step")
    return int(steps.last) if steps and known(steps.last) else None


def phases(series: Series, x: str = "step") -> pd.DataFrame:
    """Intervals (x, x2, phase) with the look-ahead on; several for a re-armed gate.

    `gate/active` is the state after a step, so a change applies from that step on.
    """
    active = series.get("gate/active") or Points()
    rows: list[tuple[float, float, str]] = []
    start = None
    # The last interval ends with the last step.
    for step, on in [*zip(active.steps, active.y, strict=True), *((step, 0.0) for step in active.steps[-1:])]:
        if on and start is None:
            start = step
        elif not on and start is not None:
            rows.append((base.value_at(active, start, x), base.value_at(active, step, x), LOOK_AHEAD))
            start = None
    return base.typed_frame(rows, x="float64", x2="float64", phase="str")


def z_chart(series: Series, x: str = "step", settings: Mapping[str, Any] = {}, color: str = HUES[2]) -> Chart:
    """z-score with τ, shut-off and phases, in units of the window's standard deviation. settings: of the gate; one that
    never fires has no τ. color: of the rule."""
    two_sided, watches = bool(settings.get("two_sided")), settings.get("mode") == "never"
    data = base.line_data(series, {"gate/z": "z-score"}, x)
    tau = series["gate/threshold"].last if series.get("gate/threshold") else math.nan
    limits = [] if watches else [tau, -tau] if two_sided else [tau]
    words = [(limit, f"{'−' if limit < 0 else ''}τ = {figure(limit)}") for limit in limits if known(limit)]
    rules = base.typed_frame(words, **base.LABELS)
    layers = [*base.line_layers(["z-score"], x, base.Z_SCORE), *base.threshold_layers()]
    drawn = Chart(
        "gate-z",
        "Gate: z-score",
        {"layer": _marked(layers, x, color)},
        {**data, "rules": rules, **_marks(series, x)},
        f"z-score of the gate against its threshold over {base.AXES[x]}, look-ahead shaded, shut-off marked",
        _z_words(series, math.inf if watches and known(tau) else tau, two_sided),
        "Not smoothed. 0 is the window mean, 1 its standard deviation; "
        + ("with mode never the look-ahead stays on." if watches else "at τ the look-ahead is switched off.")
        + (" Two-sided: also at −τ." if two_sided and not watches else ""),
        x=x,
        labels={"y": "z-score"},
        thinned=base.thinned(series.get("gate/z")),
    )
    return base.with_colors(drawn, {"z-score": base.TEXT})


def value_chart(series: Series, x: str = "step", watched: str = "monitored value", color: str = HUES[2]) -> Chart:
    """The monitored value, called `watched`, and the window's mean ± one standard deviation as a band."""
    names = {"gate/value": watched, "gate/mean": "window mean"}
    present = {name: label for name, label in names.items() if series.get(name)}
    data = base.line_data(series, present, x)
    bounds = {"x": base.x_encoding(x), "y": base.quantity("low", title=watched), "y2": {"field": "high"}}
    band = base.layer("band", "area", bounds, opacity=0.22, color=base.MUTED)
    layers = [band, *base.line_layers(list(present.values()), x, base.y_encoding(watched))]
    last = {name: series[name].last for name in ("gate/value", *WINDOW) if series.get(name)}
    words = (
        f"Latest value {figure(last.get('gate/value'))}; window mean {figure(last.get('gate/mean'))} "
        f"and standard deviation {figure(last.get('gate/std'))}."
    )
    drawn = Chart(
        "gate-value",
        "Gate: monitored value",
        {"layer": _marked(layers, x, color)},
        {**data, "band": _band(series, x), **_marks(series, x)},
        f"{watched} with the gate window's mean and spread over {base.AXES[x]}",
        words if last else "No data yet.",
        "Band: window mean ± one standard deviation.",
        x=x,
        thinned=base.thinned(*(series[name] for name in present)),
    )
    return base.with_colors(drawn, {watched: base.TEXT, "window mean": base.MUTED})


def _band(series: Series, x: str) -> pd.DataFrame:
    points = series.get("gate/mean")
    mean, std = base.column(points), base.column(series.get("gate/std"))
    frame = pd.DataFrame({"x": 0.0, "low": mean - std, "high": mean + std}).dropna()
    return frame.assign(x=[base.value_at(points, step, x) for step in frame.index])


def _marks(series: Series, x: str) -> dict[str, pd.DataFrame]:
    """Datasets of the shaded phases and of the marked shut-off."""
    step = shutoff_step(series)
    points = series.get("gate/value") or series.get("gate/active")
    rows = [] if step is None else [(base.value_at(points, step, x), f"shut off at step {count(step)}")]
    return {"phases": phases(series, x), "shutoff": base.typed_frame(rows, x="float64", label="str")}


def _marked(layers: list[Spec], x: str, color: str) -> list[Spec]:
    """Layers above the shaded phases and below the marked shut-off."""
    fill = {
        "field": "phase",
        "type": "nominal",
        "scale": {"domain": [LOOK_AHEAD], "range": [color]},
        "legend": {"orient": "top", "title": None, "symbolType": "square", "symbolOpacity": PHASE_OPACITY},
    }
    place = {"x": base.x_encoding(x), "x2": {"field": "x2"}, "fill": fill}
    words = {"align": "right", "baseline": "top", "dx": -5, "dy": 4}
    rule = {"strokeDash": [2, 3], "color": base.MUTED}
    return [
        base.layer("phases", "rect", place, opacity=PHASE_OPACITY),
        *layers,
        *base.rule_layers("shutoff", rule, {"y": {"value": 0}}, {"x": base.x_encoding(x)}, words),
    ]


def _z_words(series: Series, tau: float, two_sided: bool) -> str:
    z, step = series.get("gate/z"), shutoff_step(series)
    sign = "±" if two_sided else ""
    threshold = f"τ is {sign}{figure(tau)}" if known(tau) else "it never fires"
    scores = [value for value in z.y if known(value)] if z else []
    if step is not None:
        most = f" The maximum z-score was {figure(max(scores))}." if scores else ""
        return f"The gate fired at step {count(step)}; {threshold}.{most}"
    if math.isnan(tau):
        return "No steps yet."
    if not scores:
        return f"No z-score yet: the gate is in its warm-up; {threshold}."
    return f"Latest z-score {figure(scores[-1])}, maximum {figure(max(scores))}; {threshold}. The gate is open."
