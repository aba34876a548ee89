"""Comparison charts: means with bands, gates, and heat maps and parallel coordinates of sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gxpo_client.formats import count, figure, known, percent
from gxpo_dashboard.charts import base
from gxpo_dashboard.charts.base import Chart, Spec
from gxpo_dashboard.view_models.series import Points, number

Response = Mapping[str, Any]
LINES = ("#8fbbe3", "#1d5a9e")
CELLS, NO_VALUE, CELL_TEXT = ("#eaf2fa", "#8fbbe3"), "#d5dbe1", "#0b131d"
_BACKGROUND: Spec = {"expr": "background"}
"""The colour behind a chart, which depends on the page's mode: Streamlit sets it, and Vega has it as a signal."""
COST_OF = {"step": "steps", "backward_passes": "backward_passes", "time": "hours", "tokens": "tokens"}
"""Axis of a chart → list of a response's curve (hours, not seconds)."""


def curves_frame(comparison: Response, x: str) -> pd.DataFrame:
    """Rows (series, x, y, low, high, step): the smoothed mean of each configuration."""
    rows = [row for group in comparison["groups"] for row in _curve_rows(group["name"], group["mean"], x)]
    return base.typed_frame(rows, **base.POINTS)


def seeds_frame(comparison: Response, x: str) -> pd.DataFrame:
    """The same for each run, with `seed`."""
    rows = [
        (*row, str(run["seed"]))
        for group in comparison["groups"]
        for run in group["runs"]
        for row in _curve_rows(group["name"], run["curve"], x)
    ]
    return base.typed_frame(rows, **base.POINTS, seed="str")


def _curve_rows(name: str, curve: Mapping[str, Any], x: str) -> list[tuple[Any, ...]]:
    columns = (curve[COST_OF[x]], curve["smoothed"], curve["low"], curve["high"], curve["steps"])
    return [(name, *map(number, values)) for values in zip(*columns, strict=True)]


def accuracy_chart(comparison: Response, x: str, seeds: bool = False) -> Chart:
    """Mean accuracy of each configuration with its band; with `seeds` also each run as a thin line."""
    names = [group["name"] for group in comparison["groups"]]
    metric, level = comparison["metric"], percent(comparison["level"], 0)
    datasets = {"points": curves_frame(comparison, x)}
    layers = base.interval_layers(names, metric, x)
    if seeds:
        datasets["seeds"] = seeds_frame(comparison, x)
        place = {"x": base.x_encoding(x), "y": base.quantity(), "color": base.line_styles(names, marks=True)["color"]}
        place["detail"] = {"field": "seed"}
        layers.insert(1, base.layer("seeds", "line", place, strokeWidth=1, opacity=0.55))
    parts = [f"{group['name']} {percent(number(group['final']['accuracy']))}" for group in comparison["groups"]]
    smoothing = f" Exponential average, weight {comparison['smoothing']:g}." if comparison["smoothing"] else ""
    return Chart(
        "compare-accuracy",
        f"{metric} on {', '.join(comparison['benchmarks'])}",
        {"layer": layers},
        datasets,
        f"Mean {metric} of each configuration over {base.AXES[x]} with {level} bands",
        f"Last evaluations: {', '.join(parts)}.",
        f"Band: {level} over seeds; over problems where there is one seed.{smoothing}",
        height=380,
        x=x,
        labels={"y": metric, **{name: f"{level} {name}" for name in base.BOUNDS}},
    )


def gate_chart(comparison: Response, z: Mapping[str, Points]) -> Chart:
    """z-scores (run → points) of every run with a gate, with thresholds; never smoothed."""
    rows, limits, states = [], {}, []
    for label, run in gates(comparison):
        gate = run["gate"]
        points, tau = z.get(run["id"], Points()), number(gate["threshold"])
        rows += [(label, step, *bounds, step) for step, _, *bounds in points.drawn]
        if points and known(tau):
            limits[tau] = f"τ = {figure(tau)}"
            if gate["two_sided"]:
                limits[-tau] = f"−τ = {figure(-tau)}"
        if gate["threshold"] is not None:
            step = gate["shutoff_step"]
            states.append(f"{label} " + ("not yet" if step is None else f"at step {count(step)}"))
    data = base.line_data(rows)
    names = list(dict.fromkeys(data["points"]["series"]))
    return Chart(
        "compare-gate",
        "Gates: z-scores",
        {"layer": [*base.line_layers(names, "step", base.z_encoding()), *base.threshold_layers()]},
        {**data, "rules": base.typed_frame(limits.items(), **base.LABELS)},
        f"z-scores of all runs with a gate over {base.AXES['step']}",
        f"Shut off: {', '.join(states)}." if states else "No run has a gate.",
        "Not smoothed.",
        x="step",
        thinned=base.thinned(*z.values()),
    )


def gates(comparison: Response) -> list[tuple[str, Response]]:
    """Series of the gate chart and its run, for all runs."""
    return [
        (group["name"] if len(group["runs"]) == 1 else f"{group['name']}, seed {run['seed']}", run)
        for group in comparison["groups"]
        for run in group["runs"]
    ]


def heat_map_chart(heat_map: Response) -> Chart:
    """Heat map of a sweep over two settings, with the mean in each cell."""
    as_share, low_is_best = heat_map["show"] in ("final", "best"), heat_map["show"].endswith("_to_best")
    say = percent if as_share else figure
    x_names, y_names = ([setting_text(value) for value in heat_map[f"{axis}_values"]] for axis in "xy")
    rows = []
    for cell in heat_map["cells"]:
        value = cell["value"] or {"mean": None, "low": None}
        mean = number(value["mean"])
        bounds = "" if value["low"] is None else f"{say(number(value['low']))} to {say(number(value['high']))}"
        text = say(mean) if known(mean) else "–"
        rows.append((x_names[cell["x"]], y_names[cell["y"]], mean, text, bounds, len(cell["runs"])))
    frame = pd.DataFrame(rows, columns=["x", "y", "value", "text", "interval", "runs"])
    # Light cells in both colour schemes, so that dark text is readable.
    fill = base.quantity(
        "value",
        condition={"test": "!isValid(datum.value)", "value": NO_VALUE},
        legend=None,
        scale={"zero": False, "range": list(reversed(CELLS)) if low_is_best else list(CELLS)},
    )
    place: Spec = {
        "x": {"field": "x", "type": "ordinal", "sort": x_names, "title": heat_map["x"], "axis": {"labelAngle": 0}},
        "y": {"field": "y", "type": "ordinal", "sort": y_names, "title": heat_map["y"]},
    }
    cell_place = {**place, "color": fill, "tooltip": [{"field": name} for name in frame if name != "value"]}
    words = {**place, "text": {"field": "text"}}
    first, word = (min, "Lowest") if low_is_best else (max, "Highest")
    best = first((row for row in rows if known(row[2])), key=lambda row: row[2], default=None)
    mixed = f" Each cell also averages over {', '.join(heat_map['mixed'])}." if heat_map["mixed"] else ""
    at = f"{heat_map['x']} = {best[0]}, {heat_map['y']} = {best[1]}" if best else ""
    return Chart(
        f"heat-{heat_map['group']}",
        f"{heat_map['y']} × {heat_map['x']}",
        {
            "layer": [
                base.layer("points", "rect", cell_place, invalid=None, stroke=base.MUTED, strokeWidth=0.5),
                base.layer("points", "text", words, fontSize=15, fontWeight=600, color=CELL_TEXT),
            ]
        },
        {"points": frame},
        f"Heat map of {heat_map['metric']} over {heat_map['x']} and {heat_map['y']}",
        f"{word}: {best[3]} at {at}.{mixed}" if best else "No value.",
        height=110 + 60 * len(y_names),
        labels={"x": heat_map["x"], "y": heat_map["y"], "value": "mean"},
    )


def parallel_chart(runs: Sequence[Response], settings: Sequence[str], measure: str = "accuracy") -> Chart:
    """Parallel coordinates of a sweep: an axis per setting and one of the runs' `score`, a line per run.

    settings: dotted paths of `group_values`. measure: name of the score, a share. Values are placed by rank, so that
    1e-5 and 1e-4 are as far apart as 1e-4 and 1e-3.
    """
    scores = [(run, score) for run in runs if known(score := number(run["score"]))]
    low, high = min((score for _, score in scores), default=0.0), max((score for _, score in scores), default=1.0)
    places = {path: _ranks({setting_text(run["group_values"].get(path)) for run, _ in scores}) for path in settings}
    rows = []
    for run, score in scores:
        for path in settings:
            word = setting_text(run["group_values"].get(path))
            rows.append((run["name"], path, places[path][word], word, score))
        rows.append((run["name"], measure, (score - low) / (high - low or 1.0), percent(score), score))
    ticks = [(path, place, word) for path in settings for word, place in places[path].items()]
    ticks += [(measure, 0.0, percent(low)), (measure, 1.0, percent(high))] if scores else []
    axes = [*settings, measure]
    x: Spec = {"field": "axis", "type": "nominal", "sort": axes, "title": None}
    x |= {"axis": {"labelAngle": 0, "labelLimit": 300}, "scale": {"padding": 0.3}}
    place = {
        "x": x,
        "y": base.quantity(axis=None, scale={"padding": 14}),
        "color": base.quantity("accuracy", legend=None, scale={"zero": False, "range": list(LINES)}),
        "detail": {"field": "series"},
    }
    line = {**place, "size": {"condition": {"param": "hover", "empty": False, "value": 4}, "value": 1.6}}
    dots = {**place, "tooltip": [{"field": name} for name in ("series", "axis", "value")]}
    select = {"type": "point", "fields": ["series"], "on": "pointerover", "nearest": True, "clear": "pointerout"}
    # Lines cross the labels, so that each has a halo below it.
    words = {"x": x, "y": base.quantity(), "text": {"field": "value"}}
    font: Spec = {"align": "left", "dx": 8, "fontSize": 12}
    layers = [
        base.layer("points", "line", line, opacity=0.8),
        base.layer("points", "point", dots, params=[{"name": "hover", "select": select}], filled=True, size=40),
        base.layer("ticks", "text", words, **font, stroke=_BACKGROUND, strokeWidth=5, strokeJoin="round"),
        base.layer("ticks", "text", words, **font, color=base.TEXT),
    ]
    best, highest = max(scores, key=lambda scored: scored[1], default=({}, 0.0))
    return Chart(
        "parallel",
        "Parallel coordinates",
        {"layer": layers},
        {
            "points": base.typed_frame(rows, series="str", axis="str", y="float64", value="str", accuracy="float64"),
            "ticks": base.typed_frame(ticks, axis="str", y="float64", value="str"),
        },
        f"A line per run over {', '.join(axes)}",
        f"Highest: {percent(highest)} in {best['name']}." if best else "No evaluations yet.",
        "Darker lines have a higher score. Values of a setting are evenly spaced.",
        height=360,
    )


def _ranks(words: set[str]) -> dict[str, float]:
    """Value → its place from 0 to 1: numbers in ascending order, then words; a single value in the middle."""
    ordered = sorted(words, key=lambda w: (not known(number(w)), number(w) if known(number(w)) else 0, w))
    return {word: i / (len(ordered) - 1) if len(ordered) > 1 else 0.5 for i, word in enumerate(ordered)}


def setting_text(value: Any) -> str:
    """A value of a setting as a label."""
    return value if isinstance(value, str) else json.dumps(value)


def settings_table(comparison: Response) -> pd.DataFrame:
    """Differing settings: one row each, one column per configuration."""
    names = [group["name"] for group in comparison["groups"]]
    rows = [(row["setting"], *(row["values"].get(name) or "–" for name in names)) for row in comparison["settings"]]
    return pd.DataFrame(rows, columns=["Setting", *names], dtype="str")


def text_table(table: Response) -> pd.DataFrame:
    """A table of the response with capitalized header cells; repeated ones are numbered."""
    cells = [f"{word[:1].upper()}{word[1:]}" for word in table["header"]]
    ranks = [cells[: i + 1].count(cell) for i, cell in enumerate(cells)]
    header = [cell if rank == 1 else f"{cell} ({rank})" for cell, rank in zip(cells, ranks, strict=True)]
    return pd.DataFrame(table["rows"], columns=header, dtype="str")
