"""Comparison charts: means with bands, gates, and heat maps of sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pandas as pd

from gxpo_client.formats import count, figure, known, percent
from gxpo_dashboard.charts import base
from gxpo_dashboard.charts.base import Chart, Spec
from gxpo_dashboard.view_models.series import Points, number

Response = Mapping[str, Any]
CELLS, NO_VALUE, CELL_TEXT = ("#eaf2fa", "#8fbbe3"), "#d5dbe1", "#0b131d"
COST_OF = {"step": "steps", "backward_passes": "backward_passes", "time": "hours", "tokens": "tokens"}
"""Axis of a chart → list of a response's curve (hours, not seconds)."""


def accuracy_chart(comparison: Response, x: str) -> Chart:
    """Smoothed mean accuracy of each configuration with its band."""
    rows = []
    for group in comparison["groups"]:
        mean = group["mean"]
        columns = (mean[COST_OF[x]], mean["smoothed"], mean["low"], mean["high"], mean["steps"])
        rows += [(group["name"], *map(number, values)) for values in zip(*columns, strict=True)]
    names = [group["name"] for group in comparison["groups"]]
    metric, level = comparison["metric"], percent(comparison["level"], 0)
    parts = [f"{group['name']} {percent(number(group['final']['accuracy']))}" for group in comparison["groups"]]
    smoothing = f" Exponential average, weight {comparison['smoothing']:g}." if comparison["smoothing"] else ""
    return Chart(
        "compare-accuracy",
        f"{metric} on {', '.join(comparison['benchmarks'])}",
        {"layer": base.interval_layers(names, metric, x)},
        {"points": base.typed_frame(rows, **base.POINTS)},
        f"Mean {metric} of each configuration over {base.AXES[x]} with {level} bands",
        f"Last evaluations: {', '.join(parts)}.",
        f"Band: {level} over seeds; over problems where there is one seed.{smoothing}",
        height=380,
        x=x,
        labels={"y": metric, **{name: f"{level} {name}" for name in base.BOUNDS}},
    )


def gates(comparison: Response) -> dict[str, Response]:
    """Runs with a gate by their series: the first seed of each configuration, then the second, and so on."""
    by_seed = zip_longest(*([(group, run) for run in group["runs"]] for group in comparison["groups"]))
    members = [member for seeds in by_seed for member in seeds if member and member[1]["gate"]["threshold"] is not None]
    return {
        group["name"] if len(group["runs"]) == 1 else f"{group['name']}, seed {run['seed']}": run
        for group, run in members
    }


def gate_chart(runs: Mapping[str, Response], z: Mapping[str, Points]) -> Chart:
    """z-scores with their thresholds, never smoothed. runs: of `gates`; z: by run."""
    rows, limits, states = [], {}, []
    for name, run in runs.items():
        gate, points = run["gate"], z.get(run["id"], Points())
        rows += [(name, step, *bounds, step) for step, _, *bounds in points.drawn]
        tau, shutoff = number(gate["threshold"]), gate["shutoff_step"]
        if points and known(tau):
            limits[tau] = f"τ = {figure(tau)}"
            if gate["two_sided"]:
                limits[-tau] = f"−τ = {figure(-tau)}"
        states.append(f"{name} " + ("not yet" if shutoff is None else f"at step {count(shutoff)}"))
    data = base.line_data(rows)
    names = list(dict.fromkeys(data["points"]["series"]))
    return Chart(
        "compare-gate",
        "Gates: z-scores",
        {"layer": [*base.line_layers(names, "step", base.z_encoding()), *base.threshold_layers()]},
        {**data, "rules": base.typed_frame(limits.items(), **base.LABELS)},
        f"z-scores of runs with a gate over {base.AXES['step']}",
        f"Shut off: {', '.join(states)}.",
        "Not smoothed.",
        x="step",
        thinned=base.thinned(*z.values()),
    )


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
