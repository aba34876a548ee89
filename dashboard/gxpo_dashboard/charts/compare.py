"""Comparison charts: means with bands, gates, and heat maps of sweeps.

Parallel coordinates of a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from gxpo_client.formats import figure, known, percent
from gxpo_dashboard.charts.base import (
    AXES,
    BOUNDS,
    MUTED,
    TEXT,
    Chart,
    Spec,
    color,
    labels_frame,
    layer,
    line_layers,
    near,
    points_frame,
    quantity,
    thinned,
    threshold_layers,
    typed_frame,
    x_encoding,
    z_encoding,
)
from gxpo_dashboard.charts.benchmarks import interval_layer, score_lines
from gxpo_dashboard.view_models.series import Points, number

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


Answer = Mapping[str, Any]
COST_OF = {"step": "steps", "backward_passes": "backward_passes", "time": "hours", "tokens": "tokens"}
"""Axis of a chart → list of a response's curve (hours, not seconds)."""
_ACCURACY = "accuracy"
CELLS, NO_VALUE, CELL_TEXT = ("#eaf2fa", "#8fbbe3"), "#d5dbe1", "#0b131d"


def curves_frame(answer: Answer, x: str) -> pd.DataFrame:
    """Rows (series, x, y, low, high, step): the smoothed mean of each configuration."""
    rows: list[tuple[Any, ...]] = []
    for group in answer["groups"]:
        rows += _curve_rows(group["name"], group["mean"], x)
    return _frame(rows)


def seeds_frame(answer: Answer, x: str) -> pd.DataFrame:
    """The same for each run, with `seed`."""
    frames = [
        _frame(_curve_rows(group["name"], run["curve"], x)).assign(seed=str(run["seed"]))
        for group in answer["groups"]
        for run in group["runs"]
    ]
    return pd.concat(frames, ignore_index=True) if frames else _frame([]).assign(seed="")


def accuracy_chart(answer: Answer, x: str, seeds: bool = False) -> Chart:
    """Mean accuracy of each configuration with its band; with `seeds` also each run as a thin line."""
    names = [group["name"] for group in answer["groups"]]
    frame = curves_frame(answer, x)
    metric = answer["metric"]
    datasets = {"points": frame}
    layers = [interval_layer(names, metric, x), *score_lines(names, metric, x)]
    if seeds:
        datasets["seeds"] = seeds_frame(answer, x)
        layers.insert(1, _seed_layer(names, x))
    what = ", ".join(answer["benchmarks"])
    smoothing = f" Exponential average, weight {answer['smoothing']:g}." if answer["smoothing"] else ""
    return Chart(
        "compare-accuracy",
        f"{metric} on {what}",
        {"layer": layers},
        datasets,
        f"Mean {metric} of each configuration over {AXES[x]} with {percent(answer['level'], 0)} bands",
        _accuracy_words(answer),
        f"Band: {percent(answer['level'], 0)} over seeds; over problems where there is one seed.{smoothing}",
        height=380,
        labels={"x": AXES[x], "y": metric, **{name: f"{percent(answer['level'], 0)} {name}" for name in BOUNDS}},
    )


def gate_chart(answer: Answer, z: Mapping[str, Points]) -> Chart:
    """z-scores (run → points) of every run with a gate, with thresholds; never smoothed."""
    rows, limits = [], {}
    for group in answer["groups"]:
        for run in group["runs"]:
            gate, label = run["gate"], _run_label(group, run)
            points = z.get(run["id"], Points())
            rows += [(label, float(step), value, step) for step, value in zip(points.steps, points.y, strict=True)]
            tau = number(gate["threshold"])
            if points and known(tau):
                limits[tau] = f"τ = {figure(tau)}"
                if gate["two_sided"]:
                    limits[-tau] = f"−τ = {figure(-tau)}"
    frame = points_frame(rows)
    names = list(dict.fromkeys(frame["series"]))
    rules = labels_frame(limits.items())
    return Chart(
        "compare-gate",
        "Gates: z-scores",
        {"layer": [*line_layers(names, "step", z_encoding()), *threshold_layers()]},
        {"points": frame, "near": near(frame), "rules": rules},
        f"z-scores of all runs with a gate over {AXES['step']}",
        _gate_words(answer),
        "Not smoothed.",
        labels={"x": AXES["step"]},
        thinned=thinned(*z.values()),
    )


def heat_map_chart(answer: Answer) -> Chart:
    """Heat map of a sweep over two settings, with the mean in each cell."""
    as_share, low_is_best = answer["show"] in ("final", "best"), answer["show"].endswith("_to_best")
    say = percent if as_share else figure
    x_names, y_names = [setting_text(v) for v in answer["x_values"]], [setting_text(v) for v in answer["y_values"]]
    rows = []
    for cell in answer["cells"]:
        value = cell["value"]
        mean = number(value["mean"]) if value else float("nan")
        bounds = (
            f"{say(number(value['low']))} to {say(number(value['high']))}" if value and value["low"] is not None else ""
        )
        text = say(mean) if known(mean) else "–"
        rows.append((x_names[cell["x"]], y_names[cell["y"]], mean, text, bounds, len(cell["runs"])))
    frame = pd.DataFrame(rows, columns=["x", "y", "value", "text", "interval", "runs"])
    x: Spec = {"field": "x", "type": "ordinal", "sort": x_names, "title": answer["x"], "axis": {"labelAngle": 0}}
    y: Spec = {"field": "y", "type": "ordinal", "sort": y_names, "title": answer["y"]}
    tips = [{"field": name} for name in ("x", "y", "text", "interval", "runs")]
    # Light cells in both colour schemes, so that dark text is readable.
    fill = quantity(
        "value",
        condition={"test": "!isValid(datum.value)", "value": NO_VALUE},
        legend=None,
        scale={"zero": False, "range": list(reversed(CELLS)) if low_is_best else list(CELLS)},
    )
    place = {"x": x, "y": y}
    cells = layer(
        "points", "rect", {**place, "color": fill, "tooltip": tips}, invalid=None, stroke=MUTED, strokeWidth=0.5
    )
    words = {**place, "text": {"field": "text"}}
    texts = layer("points", "text", words, fontSize=15, fontWeight=600, color=CELL_TEXT)
    first, word = (min, "Lowest") if low_is_best else (max, "Highest")
    best = first((row for row in rows if known(row[2])), key=lambda row: row[2], default=None)
    mixed = f" Each cell also averages over {', '.join(answer['mixed'])}." if answer["mixed"] else ""
    return Chart(
        f"heat-{answer['group']}",
        f"{answer['y']} × {answer['x']}",
        {"layer": [cells, texts]},
        {"points": frame},
        f"Heat map of {answer['metric']} over {answer['x']} and {answer['y']}",
        f"{word}: {best[3]} at {answer['x']} = {best[0]}, {answer['y']} = {best[1]}.{mixed}" if best else "No value.",
        zoomable=False,
        height=110 + 60 * len(y_names),
        labels={"x": answer["x"], "y": answer["y"], "value": "mean"},
    )


def runs_of_series(answer: Answer) -> dict[str, str]:
    """Series of the accuracy chart → id of one of its runs."""
    return {group["name"]: group["runs"][0]["id"] for group in answer["groups"]}


def runs_of_gates(answer: Answer) -> dict[str, str]:
    """Series of the gate chart → id of its run."""
    return {_run_label(group, run): run["id"] for group in answer["groups"] for run in group["runs"]}


def settings_table(answer: Answer) -> pd.DataFrame:
    """Differing settings: one row per setting, one column per configuration."""
    return _differing(answer, "settings", "Setting", lambda value: "–" if value is None else str(value))


def conditions_table(answer: Answer) -> pd.DataFrame:
    """Differing conditions and hardware."""
    return _differing(answer, "differences", "Condition", lambda values: ", ".join(["–"] if values is None else values))


def _differing(answer: Answer, part: str, title: str, say: Callable[[Any], str]) -> pd.DataFrame:
    names = [group["name"] for group in answer["groups"]]
    rows = [(entry["setting"], *(say(entry["values"].get(name)) for name in names)) for entry in answer[part]]
    return pd.DataFrame(rows, columns=[title, *names])


def text_table(table: Mapping[str, Any]) -> pd.DataFrame:
    """A table of the response with capitalized header cells; repeated ones are numbered."""
    seen: dict[str, int] = {}
    header = []
    for cell in (f"{word[:1].upper()}{word[1:]}" for word in table["header"]):
        seen[cell] = seen.get(cell, 0) + 1
        header.append(cell if seen[cell] == 1 else f"{cell} ({seen[cell]})")
    return pd.DataFrame(table["rows"], columns=header, dtype="str")


def _curve_rows(name: str, curve: Mapping[str, Any], x: str) -> list[tuple[Any, ...]]:
    columns = (curve[COST_OF[x]], curve["smoothed"], curve["low"], curve["high"], curve["steps"])
    return [
        (name, number(at), number(y), number(low), number(high), int(number(step)))
        for at, y, low, high, step in zip(*columns, strict=True)
    ]


def _frame(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    numbers = dict.fromkeys(("x", "y", "low", "high"), "float64")
    return typed_frame(rows, series="str", **numbers, step="int64")


def _seed_layer(names: Sequence[str], x: str) -> Spec:
    place = {"x": x_encoding(x), "y": quantity(), "color": color(names, marks=True), "detail": {"field": "seed"}}
    return layer("seeds", "line", place, aria=False, strokeWidth=1, opacity=0.55)


def _run_label(group: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    return group["name"] if len(group["runs"]) == 1 else f"{group['name']}, seed {run['seed']}"


def _accuracy_words(answer: Answer) -> str:
    parts = [f"{group['name']} {percent(number(group['final']['accuracy']))}" for group in answer["groups"]]
    return f"Last evaluations: {', '.join(parts)}."


def _gate_words(answer: Answer) -> str:
    parts = [
        f"{_run_label(group, run)} "
        + (f"at step {run['gate']['shutoff_step']}" if run["gate"]["shutoff_step"] is not None else "not yet")
        for group in answer["groups"]
        for run in group["runs"]
        if run["gate"]["threshold"] is not None
    ]
    return f"Shut off: {', '.join(parts)}." if parts else "No run has a gate."
