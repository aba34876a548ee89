"""Charts of a run's steps: the gate, backward passes by phase compared with other rules, times, and the timeline.

The z-score of the gate is never smoothed: a single step above τ fires it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from gxpo_client.formats import count, duration, figure, known, number_of
from gxpo_dashboard.charts import base
from gxpo_dashboard.charts.base import Chart, Spec
from gxpo_dashboard.view_models.rules import Rule, Rules, shade
from gxpo_dashboard.view_models.series import EVEN, Points, Series, Totals

GATE = tuple(f"gate/{name}" for name in ("active", "z", "threshold", "value", "shutoff_step"))
WINDOW = ("gate/mean", "gate/std")
"""Requested as joined series: both bounds of the band need both."""
LOOK_AHEAD, FALLBACK = "look-ahead on", "fallback to GRPO"
PHASE_OPACITY = 0.22
"""Visible on light and dark pages: tests measure it."""


def shutoff_step(series: Series) -> int | None:
    """The step at which the gate fired, if any."""
    steps = series.get("gate/shutoff_step")
    return int(steps.last) if steps and known(steps.last) else None


def phases(series: Series, x: str) -> pd.DataFrame:
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


def z_chart(series: Series, x: str, settings: Mapping[str, Any], color: str, *, part: bool = False) -> Chart:
    """z-score with τ, shut-off and phases, in units of the window's standard deviation. settings: of the gate; one that
    never fires has no τ. color: of the rule. part: whether the series are a part of the run's."""
    two_sided, watches = bool(settings.get("two_sided")), settings.get("mode") == "never"
    data = base.line_data(series, {"gate/z": "z-score"}, x)
    tau = series["gate/threshold"].last if series.get("gate/threshold") else math.nan
    limits = [] if watches else [tau, -tau] if two_sided else [tau]
    words = [(limit, f"{'−' if limit < 0 else ''}τ = {figure(limit)}") for limit in limits if known(limit)]
    rules = base.typed_frame(words, **base.LABELS)
    layers = [*base.line_layers(["z-score"], x, base.Z_SCORE), *base.threshold_layers()]
    chart = Chart(
        "gate-z",
        "Gate: z-score",
        {"layer": layers},
        {**data, "rules": rules},
        f"z-score of the gate against its threshold over {base.AXES[x]}, look-ahead shaded, shut-off marked",
        _z_words(series, math.inf if watches and known(tau) else tau, two_sided, part),
        "Not smoothed. 0 is the window mean, 1 its standard deviation; "
        + ("with mode never the look-ahead stays on." if watches else "at τ the look-ahead is switched off.")
        + (" Two-sided: also at −τ." if two_sided and not watches else ""),
        x=x,
        labels={"y": "z-score"},
        thinned=base.thinned(series.get("gate/z")),
    )
    return base.with_colors(_with_phases(chart, series, color), {"z-score": base.TEXT})


def value_chart(series: Series, x: str, watched: str, color: str) -> Chart:
    """The monitored value, called `watched`, and the window's mean ± one standard deviation as a band."""
    names, note = {"gate/value": watched, "gate/mean": "window mean"}, "Band: window mean ± one standard deviation."
    chart = base.metric_chart(base.Plot("gate-value", "Gate: monitored value", names, watched, note=note), series, x)
    mean, std = (base.column(series.get(name)) for name in WINDOW)
    spread = pd.DataFrame({"low": mean - std, "high": mean + std}).dropna()
    spread["x"] = [base.value_at(series.get("gate/mean"), step, x) for step in spread.index]
    bounds = {"x": base.x_encoding(x), "y": base.quantity("low", title=watched), "y2": {"field": "high"}}
    band = base.layer("band", "area", bounds, opacity=0.22, color=base.MUTED)
    chart = replace(chart, spec={"layer": [band, *chart.spec["layer"]]}, datasets={**chart.datasets, "band": spread})
    colors = {watched: base.TEXT, "window mean": base.MUTED}
    return base.with_colors(_with_phases(chart, series, color), colors)


def _with_phases(chart: Chart, series: Series, shading: str) -> Chart:
    """The chart above the shaded phases with the look-ahead, and below the marked shut-off."""
    step, points = shutoff_step(series), series.get("gate/value") or series.get("gate/active")
    rows = [] if step is None else [(base.value_at(points, step, chart.x), f"shut off at step {count(step)}")]
    marks = {"phases": phases(series, chart.x), "shutoff": base.typed_frame(rows, x="float64", label="str")}
    fill = {
        "field": "phase",
        "type": "nominal",
        "scale": {"domain": [LOOK_AHEAD], "range": [shading]},
        "legend": {"orient": "top", "title": None, "symbolType": "square", "symbolOpacity": PHASE_OPACITY},
    }
    place = {"x": base.x_encoding(chart.x), "x2": {"field": "x2"}, "fill": fill}
    label = {"align": "right", "baseline": "top", "dx": -5, "dy": 4}
    rule = {"strokeDash": [2, 3], "color": base.MUTED}
    layers = [
        base.layer("phases", "rect", place, opacity=PHASE_OPACITY),
        *chart.spec["layer"],
        *base.rule_layers("shutoff", rule, {"y": {"value": 0}}, {"x": base.x_encoding(chart.x)}, label),
    ]
    return replace(chart, spec={"layer": layers}, datasets={**chart.datasets, **marks})


def _z_words(series: Series, tau: float, two_sided: bool, part: bool) -> str:
    z, step = series.get("gate/z"), shutoff_step(series)
    sign = "±" if two_sided else ""
    threshold = f"τ is {sign}{figure(tau)}" if known(tau) else "it never fires"
    scores = [value for value in z.y if known(value)] if z else []
    most = max(map(abs, scores) if two_sided else scores, default=math.nan)
    name = "largest |z|" if two_sided else "maximum z-score"
    if step is not None:
        return f"The gate fired at step {count(step)}; {threshold}." + (
            f" The {name} was {figure(most)}." if scores else ""
        )
    if math.isnan(tau):
        return "No steps."
    if not scores:
        return f"No z-score during the gate's warm-up; {threshold}."
    words = f"Latest z-score {figure(scores[-1])}, {name} {figure(most)}; {threshold}."
    return words if part else f"{words} The gate has not fired."


PASSES = ("update/backward_passes", "update/backward_passes_total")


def passes_by_phase(series: Series, rule: Rule) -> pd.DataFrame:
    """Rows (x, series, y): cumulative backward passes per phase, summing to the total. One phase without a gate.

    The phase of a step is the last known `gate/active` before it: both are thinned to steps of their own. Between
    thinned points, all backward passes count towards the phase at their end.
    """
    total, active = series.get("update/backward_passes_total"), series.get("gate/active") or Points()
    rows: list[tuple[int, str, float]] = []
    spent = {LOOK_AHEAD: 0.0, FALLBACK: 0.0}
    before = 0.0
    for step, value in zip(total.steps, total.y, strict=True) if total else ():
        if not known(value):
            continue
        place = bisect_left(active.steps, step)
        spent[FALLBACK if place and not active.y[place - 1] else LOOK_AHEAD] += value - before
        before = value
        parts = {f"{rule.label} steps": value} if rule.watched is None else spent
        rows += [(step, phase, passes) for phase, passes in parts.items()]
    return base.typed_frame(rows, **base.PARTS)


def budget_chart(
    series: Series, settings: Mapping[str, Any], budget: float | None, rules: Rules, warm_steps: int = 0
) -> Chart:
    """Stacked area of the run's backward passes, a rule at the budget, and lines of the other rules on the same steps
    with open gates: with the settings of the run where the rule has them, and its defaults elsewhere.

    settings: the run's `learner.rule`. warm_steps: supervised steps before the first of the rule, which count as none.
    """
    rule = rules.of(settings)
    own = passes_by_phase(series, rule)
    others = [other for other in rules.known if other.name != rule.name and other.family != "control"]
    lines = {} if own.empty else {other.label_with_cost(settings): other for other in others}
    costs = {label: other.passes_per_step(settings) for label, other in lines.items()}
    # The browser redraws every point on each refresh, and a step has one per rule: mark at most 100 steps.
    steps = sorted(set(own["x"]), reverse=True)
    marked = sorted(steps[:: math.ceil(len(steps) / 100) or 1])
    rows = [(x, label, cost * max(0, x - warm_steps)) for label, cost in costs.items() for x in (0, *marked)]
    hypothetical = base.typed_frame(rows, **base.PARTS)
    # One colour and dash per name, areas and lines in one legend; those of a rule are the same for every run.
    areas, dashed = [f"{rule.label} steps"] if rule.watched is None else [LOOK_AHEAD, FALLBACK], base.DASHES[1:]
    names, key = [*areas, *lines], base.legend([*areas, *lines])
    fills = [rule.color, shade(rules.baseline.color, 1)][: len(areas)]
    dashes = [(1, 0)] * len(areas) + [dashed[other.position % len(dashed)] for other in lines.values()]
    styles = {
        "color": base.by_series(key, names, range=[*fills, *(other.color for other in lines.values())]),
        "strokeDash": base.by_series(key, names, range=dashes),
    }
    x, axis = base.x_encoding("step"), {"format": "~s", "tickCount": 5, "titlePadding": 8, "labelFlush": False}
    y = base.quantity(title="backward passes", axis=axis, scale={"padding": 18, "nice": False})
    order = {"condition": [{"test": f"datum.series === '{FALLBACK}'", "value": 1}], "value": 0}
    area = {"x": x, "y": {**y, "stack": "zero"}, "order": order, "color": styles["color"]}
    tips: list[Spec] = [
        {"field": "series"},
        {"field": "x", "title": "step", "format": ",d"},
        {"field": "y", "title": "backward passes", "format": ",d"},
    ]
    dots = {"x": x, "y": y, "opacity": base.on_hover(), "tooltip": tips}
    layers = [
        base.layer("own", "area", area, opacity=0.6),
        base.layer("others", "line", {"x": x, "y": y, **styles}, strokeWidth=2),
        base.layer("points", "point", dots, param=base.HOVER, filled=True, size=45, color=base.MUTED),
    ]
    place = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    layers += base.rule_layers("limit", {"color": base.MUTED}, {"x": {"value": 0}}, {"y": base.quantity()}, place)
    limit = [(budget, f"budget {count(budget)}")] if budget else []
    points = pd.concat([own[own["x"].isin(marked)], hypothetical[hypothetical["x"] > 0]], ignore_index=True)
    # From zero passes at step 0, so that a single step has an area.
    own = pd.concat([own.drop_duplicates("series").assign(x=0.0, y=0.0), own], ignore_index=True)
    return Chart(
        "budget",
        "Backward passes",
        {"layer": layers},
        {"points": points, "own": own, "others": hypothetical, "limit": base.typed_frame(limit, **base.LABELS)},
        f"Backward passes over {base.AXES['step']} by phase, compared with other rules",
        _spent(own, hypothetical, budget),
        "Areas: this run. Lines: other rules on the same steps with open gates.",
        x="step",
        thinned=EVEN if len(marked) < len(steps) else base.thinned(series.get("update/backward_passes_total")) and EVEN,
    )


def _spent(own: pd.DataFrame, hypothetical: pd.DataFrame, budget: float | None) -> str:
    """Backward passes by phase at the newest step, and those of the other rules."""
    if own.empty:
        return "No steps."
    newest = own["x"].max()
    spent = own[own["x"] == newest].set_index("series")["y"]
    parts = ", ".join(f"{count(value)} in {name}" for name, value in spent.items() if value)
    other = hypothetical[hypothetical["x"] == newest].set_index("series")["y"]
    compared = ", ".join(f"{name}: {count(value)}" for name, value in other.items())
    of = f" of {count(budget)}" if budget else ""
    words = f"{number_of(float(spent.sum()), 'backward pass')}{of} after {number_of(newest, 'step')} ({parts})."
    return f"{words} Others: {compared}." if compared else words


STEP_PARTS = {
    "time/rollout_s": "sampling",
    "time/verify_s": "verifying",
    "time/update_s": "update",
    "time/sync_s": "weight sync",
}
REST = "other"
OUTSIDE_STEP = {"time/evaluate_s": "evaluation", "time/checkpoint_s": "checkpoints"}
"""Not part of a step's time, and excluded from comparisons by time."""
WHOLE = "time/step_s"
TIMES = (*STEP_PARTS, *OUTSIDE_STEP, WHOLE)
"""Requested as joined series: parts of a step are subtracted from its time."""


def step_parts(series: Series) -> pd.DataFrame:
    """Rows (x, series, y): seconds of each part of each step; the rest is `time/step_s` minus the parts."""
    whole = base.column(series.get(WHOLE))
    parts = pd.DataFrame({label: base.column(series.get(name)) for name, label in STEP_PARTS.items()}, whole.index)
    parts[REST] = (whole - parts.sum(axis="columns")).clip(lower=0.0)
    return base.typed_frame(parts.stack().dropna().reset_index().itertuples(index=False), **base.PARTS)


def mean_seconds(totals: Totals, parts: Mapping[str, str]) -> dict[str, float]:
    """Mean seconds a step of these metrics (name → label), over all steps; empty without a step."""
    _, num_steps = totals.get(WHOLE, (0.0, 0))
    present = {label: totals[name] for name, label in parts.items() if name in totals}
    return {label: total / num_steps for label, (total, num) in present.items() if num and num_steps}


def step_time_chart(series: Series, totals: Totals) -> Chart:
    """Stacked seconds of a step. totals: of all steps."""
    frame = step_parts(series)
    names = [label for label in (*STEP_PARTS.values(), REST) if label in set(frame["series"])]
    order = {label: position for position, label in enumerate(names)}
    frame = frame.assign(order=frame["series"].map(order).astype("float64"))
    encoding: Spec = {
        "x": base.x_encoding("step"),
        "y": base.quantity(
            stack="zero", title="seconds", axis={"format": base.NUMBER, "tickCount": 5, "labelFlush": False}
        ),
        "order": base.quantity("order"),
        "fill": base.by_series(base.legend(names, symbolType="square"), names),
    }
    area: Spec = {"interpolate": "step-before", "opacity": 0.85, "line": False, "tooltip": True}
    parts = mean_seconds(totals, STEP_PARTS)
    whole = mean_seconds(totals, {WHOLE: WHOLE}).get(WHOLE, 0.0)
    parts[REST] = max(0.0, whole - sum(parts.values()))
    words = ", ".join(f"{name} {duration(mean)} ({100 * mean / whole:.0f}%)" for name, mean in parts.items() if whole)
    points = frame[["x", "series", "y", "order"]]
    # A step takes from the end of the one before it to its own.
    first = points[points["x"] == points["x"].min()]
    outside = "".join(f", {name} {duration(mean)}" for name, mean in mean_seconds(totals, OUTSIDE_STEP).items())
    return Chart(
        "step-time",
        "Step time",
        {"layer": [base.layer("areas", "area", encoding, **area)]},
        {"points": points, "areas": pd.concat([first.assign(x=first["x"] - 1), points], ignore_index=True)},
        f"Seconds of sampling, verifying, update, weight sync and other, stacked over {base.AXES['step']}",
        f"Mean: {words}{outside and f'; outside of steps{outside[1:]} a step'}." if whole else "No steps.",
        "Stacked in legend order, from the bottom. Evaluation and checkpoints are not part of a step.",
        x="step",
        thinned=base.thinned(series.get(WHOLE)),
    )


ACTIVITIES = ("sampling", "verifying", "updating", "syncing", "saving", "evaluating")
_ROW = 28
"""Height of a process in pixels."""


def timeline_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """One row per process, activities in seconds since the first step began; a gap is idle time. Of the newest attempt,
    without the pause before it."""
    steps = [step for step in steps if step["attempt"] == steps[-1]["attempt"]]
    rows = [
        (span["process"], span["activity"], shift + span["begin"], shift + span["end"], step["step"])
        for step in steps
        for shift in [step["begin"] - steps[0]["begin"]]
        for span in step["spans"]
    ]
    frame = base.typed_frame(rows, process="str", series="str", x="float64", x2="float64", step="int64")
    processes = sorted(set(frame["process"]), key=lambda name: (not name.startswith("learner"), len(name), name))
    encoding: Spec = {
        "x": base.quantity("x", title="seconds", axis={"grid": False, "tickCount": 8}, scale={"nice": False}),
        "x2": {"field": "x2"},
        "y": {"field": "process", "type": "nominal", "sort": processes, "title": None},
        "fill": base.by_series(base.legend(ACTIVITIES, symbolType="square"), ACTIVITIES),
        "tooltip": [{"field": name} for name in ("process", "series", "step", "x", "x2")],
    }
    length = frame["x2"].max() - frame["x"].min()
    busy = (frame["x2"] - frame["x"]).groupby(frame["process"]).sum()
    shares = ", ".join(f"{name} {100 * seconds / length:.0f}%" for name, seconds in busy.items())
    return Chart(
        "timeline",
        "Timeline",
        {"layer": [base.layer("points", "bar", encoding, height={"band": 0.8})]},
        {"points": frame},
        "Sampling, verifying, updating, syncing and evaluating of each process over the last steps",
        f"Busy over the last {number_of(frame['step'].nunique(), 'step')}: {shares}." if shares else "No timeline.",
        "A gap is idle time. With rollout.async_depth ≥ 1 engines sample while the learner updates.",
        height=120 + _ROW * len(processes),
        labels={"series": "activity", "x": "begin (s)", "x2": "end (s)"},
    )
