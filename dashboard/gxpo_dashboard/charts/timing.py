"""Charts of step times."""

from __future__ import annotations

import pandas as pd

from gxpo_client.formats import duration, known
from gxpo_dashboard.charts.base import (
    AXES,
    NUMBER,
    TEXT,
    Chart,
    Spec,
    by_series,
    layer,
    quantity,
    thinned,
    typed_frame,
    x_encoding,
    zoom_params,
)
from gxpo_dashboard.view_models.series import Series, Totals

PARTS = {
    "time/rollout_s": "sampling",
    "time/verify_s": "verifying",
    "time/update_s": "update",
    "time/sync_s": "weight sync",
}
REST = "other"
OUTSIDE_STEP = {"time/evaluate_s": "evaluation", "time/checkpoint_s": "checkpoints"}
"""Not part of a step's time, and excluded from comparisons by time."""
WHOLE = "time/step_s"
NAMES = (*PARTS, *OUTSIDE_STEP, WHOLE)
"""Requested as joined series: parts of a step are subtracted from its time."""


def step_parts(series: Series) -> pd.DataFrame:
    """Rows (x, series, y): seconds of each part of each step; the rest is `time/step_s` minus the parts."""
    whole = series.get(WHOLE)
    if not whole:
        return _frame([])
    parts = {
        label: dict(zip(found.steps, found.y, strict=True))
        for name, label in PARTS.items()
        if (found := series.get(name))
    }
    rows: list[tuple[float, str, float]] = []
    for step, total in zip(whole.steps, whole.y, strict=True):
        if not known(total):
            continue
        seconds = {label: at[step] for label, at in parts.items() if known(at.get(step))}
        rows += [(float(step), label, value) for label, value in seconds.items()]
        rows.append((float(step), REST, max(0.0, total - sum(seconds.values()))))
    return _frame(rows)


def mean_parts(totals: Totals) -> dict[str, float]:
    """Mean seconds of each part over all steps; the rest is that of `time/step_s` minus the parts."""
    whole = totals.get(WHOLE)
    if whole is None or not whole.count:
        return {}
    seconds = {label: totals[name].sum for name, label in PARTS.items() if name in totals and totals[name].count}
    seconds[REST] = max(0.0, whole.sum - sum(seconds.values()))
    return {label: value / whole.count for label, value in seconds.items()}


def step_time_chart(series: Series, totals: Totals) -> Chart:
    """Stacked seconds of a step. totals: of all steps."""
    frame = step_parts(series)
    names = [label for label in (*PARTS.values(), REST) if label in set(frame["series"])]
    order = {label: position for position, label in enumerate(names)}
    frame = frame.assign(order=frame["series"].map(order).astype("float64"))
    axis = {"format": NUMBER, "tickCount": 5, "labelFlush": False}
    encoding: Spec = {
        "x": x_encoding("step"),
        "y": quantity(stack="zero", title="seconds", axis=axis),
        "order": quantity("order"),
        "fill": by_series({"orient": "top", "title": None, "symbolType": "square", "columns": 5}, names),
    }
    area: Spec = {"interpolate": "step", "opacity": 0.85, "line": False, "tooltip": True}
    return Chart(
        "step-time",
        "Step time",
        {"layer": [layer("points", "area", encoding, params=zoom_params(), **area)]},
        {"points": frame[["x", "series", "y", "order"]]},
        f"Seconds of sampling, verifying, update, weight sync and other, stacked over {AXES['step']}",
        _words(totals),
        "Stacked in legend order, from the bottom. Evaluation and checkpoints are not part of a step.",
        labels={"x": AXES["step"]},
        thinned=thinned(series.get(WHOLE)),
    )


def means(totals: Totals) -> pd.DataFrame:
    """Rows (series, y, label): mean seconds of a step's parts; evaluation and checkpoints spread over all steps."""
    rows = mean_parts(totals)
    if rows:
        steps = totals[WHOLE].count
        outside = {label: totals[name] for name, label in OUTSIDE_STEP.items() if name in totals}
        rows |= {label: found.sum / steps for label, found in outside.items() if found.count}
    frame = typed_frame(rows.items(), series="str", y="float64")
    return frame.assign(label=[duration(value) for value in frame["y"]])


def totals_chart(totals: Totals) -> Chart:
    """Mean seconds per step of each part, including evaluation and checkpoints, as labelled bars."""
    frame = means(totals)
    names = [*PARTS.values(), REST, *OUTSIDE_STEP.values()]
    y: Spec = {"field": "series", "type": "nominal", "sort": names, "title": None, "axis": {"labelLimit": 160}}
    axis, scale = {"tickCount": 5, "format": NUMBER}, {"padding": 40, "nice": False, "zero": True}
    place = {"x": quantity(title="mean seconds per step", axis=axis, scale=scale), "y": y}
    values = layer("points", "text", {**place, "text": {"field": "label"}}, align="left", dx=4, color=TEXT)
    words = ", ".join(f"{row.series} {row.label}" for row in frame.itertuples())
    return Chart(
        "time-totals",
        "Mean step time",
        {"layer": [layer("points", "bar", place), values]},
        {"points": frame},
        "Mean seconds per step of each part, including evaluation and checkpoints",
        f"{words[:1].upper()}{words[1:]}." if words else "No steps yet.",
        "Evaluation and checkpoints are averaged over all steps and excluded from comparisons by time.",
        zoomable=False,
        labels={"series": "part", "y": "seconds per step", "label": "formatted"},
    )


def _frame(rows: list[tuple[float, str, float]]) -> pd.DataFrame:
    return typed_frame(rows, x="float64", series="str", y="float64")


def _words(totals: Totals) -> str:
    parts = mean_parts(totals)
    whole = sum(parts.values())
    if not whole:
        return "No steps yet."
    shares = ", ".join(f"{name} {100 * value / whole:.0f}%" for name, value in parts.items())
    return f"Share of step time: {shares}."
