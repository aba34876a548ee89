"""Charts of evaluations: scores with intervals over training, comparisons, their gates, and heat maps of sweeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pandas as pd

from gxpo_client.formats import NONE, count, figure, known, percent
from gxpo_dashboard.charts import base
from gxpo_dashboard.charts.base import Chart, Spec
from gxpo_dashboard.labels import TERMINAL
from gxpo_dashboard.view_models.series import EVEN, Points, number

Response = Mapping[str, Any]
CELLS, NO_VALUE, CELL_TEXT = ("#eaf2fa", "#8fbbe3"), "#d5dbe1", "#0b131d"
COST_OF = {"step": "steps", "backward_passes": "backward_passes", "time": "hours", "tokens": "tokens"}
"""Axis of a chart → list of a response's curve (hours, not seconds)."""
_TOTALS = {"step": "step", "backward_passes": "backward_passes_total", "time": "training_s", "tokens": "tokens_total"}
"""Axis of a chart → member of an evaluation."""
TITLES = {
    "math500": "MATH-500",
    "amc23": "AMC23",
    "gsm8k": "GSM8K",
    "minerva": "Minerva Math",
    "olympiadbench": "OlympiadBench",
    "aime24": "AIME24",
    "word_problems": "Word problems (embedded)",
    "arithmetic_skill": "Arithmetic skill (embedded)",
}
_MOST_DRAWN = 100
"""Evaluations of a line, each of which the browser draws as a mark."""


def scores_frame(evaluations: Iterable[Response], metric: str, label: str, x: str) -> pd.DataFrame:
    """Evaluation records of a run as rows; `low` and `high` are the 95% interval over problems, NaN if unknown.

    x: the axis; records without its cost are omitted.
    """
    names = (metric, f"{metric}/ci_low", f"{metric}/ci_high")
    rows = []
    for record in evaluations:
        at, scores = base.axis_value(number(record.get(_TOTALS[x])), x), record["scores"]
        if metric in scores and known(at):
            values = [number(scores.get(name)) for name in names]
            rows.append((record["benchmark"], label, at, *values, int(record["step"])))
    return base.typed_frame(rows, benchmark="str", **base.POINTS)


def sorted_scores(names: Iterable[str]) -> list[str]:
    """Those of the names that are scores: `pass@k`, then `maj@n`, in ascending order."""
    scores = {name for name in names if name.partition("@")[2].isdecimal() and "/" not in name}
    return sorted(scores, key=lambda name: (name.partition("@")[0] != "pass", int(name.partition("@")[2])))


def published_scores(response: Mapping[str, Any]) -> pd.DataFrame:
    """Published sampled pass@1 as rows (model, method, benchmark, y in [0, 1])."""
    rows = [
        (row["model"], row["method"].upper() + (f" K={row['k']}" if row.get("k") else ""), name, value / 100)
        for table in response.get("tables", [])
        if table.get("name") == "sampled_pass@1"
        for row in table["rows"]
        for name, value in row["scores"].items()
        if value is not None
    ]
    return base.typed_frame(rows, model="str", method="str", benchmark="str", y="float64")


def benchmark_chart(
    benchmark: str,
    frame: pd.DataFrame,
    metric: str,
    names: Sequence[str],
    published: pd.DataFrame,
    x: str,
    span: tuple[float, float] | None = None,
) -> Chart:
    """A benchmark over training: line and interval per run; published values as labelled rules. span: the visible part
    of the axis."""
    own = frame[frame["benchmark"] == benchmark]
    rules = _rules(benchmark, published)
    place = {"y": base.quantity(), "tooltip": [{"field": "label", "title": "published"}]}
    title, present = TITLES.get(benchmark, benchmark), [name for name in names if name in set(own["series"])]
    chart = _chart(f"benchmark-{benchmark}", f"{title}: {metric}", own, present, metric, x, span)
    if rules.empty:
        return chart
    return replace(
        chart,
        spec={"layer": [*chart.spec["layer"], base.layer("rules", "rule", place, strokeDash=[5, 4], color=base.MUTED)]},
        datasets={**chart.datasets, "rules": rules},
        summary=chart.summary + (f" Published: {', '.join(rules['label'])}." if len(own) else ""),
        note=f"{chart.note} Dashed: published.",
    )


def accuracy_chart(
    evaluations: Sequence[Response], metric: str, x: str, span: tuple[float, float] | None = None
) -> Chart:
    """One run: every benchmark as a line with its interval. span: the visible part of the axis."""
    frame = scores_frame(evaluations, metric, "", x)
    frame["series"] = frame["benchmark"].map(lambda name: TITLES.get(name, name)).astype("str")
    # Line by line, in the order of the benchmarks.
    frame = pd.concat([rows for _, rows in frame.groupby("series", sort=False)] or [frame], ignore_index=True)
    names = list(dict.fromkeys(frame["series"]))
    return _chart(f"accuracy-{metric}", f"Benchmark accuracy ({metric})", frame, names, metric, x, span)


def _chart(
    key: str,
    title: str,
    frame: pd.DataFrame,
    names: Sequence[str],
    metric: str,
    x: str,
    span: tuple[float, float] | None,
) -> Chart:
    """Of a long line, evenly spaced evaluations of its visible part and the last one there."""
    visible = frame if span is None else frame[frame["x"].between(*span)]
    lines = visible.groupby("series")["step"]
    place, size = lines.cumcount(), lines.transform("size")
    drawn = visible[(place % -(-size // _MOST_DRAWN) == 0) | (place == size - 1)].drop(columns=["benchmark"])
    return Chart(
        key,
        title,
        {"layer": base.interval_layers(names, metric, x)},
        {"points": drawn},
        f"{title} over {base.AXES[x]} with 95% intervals",
        _words(frame, metric),
        "Shaded: 95% interval over problems.",
        x=x,
        height=base.height_with_legend(names),
        labels={"y": metric, "low": "95% low", "high": "95% high"},
        thinned=EVEN if len(drawn) < len(visible) else "",
    )


def score_table(frame: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Latest and best score per run and benchmark as text, with the published values of one model."""
    rows = []
    for (benchmark, label), scores in frame.groupby(["benchmark", "series"], sort=False):
        newest, best = scores.loc[scores["step"].idxmax()], scores.loc[scores["y"].fillna(-1.0).idxmax()]
        row = {
            "Benchmark": TITLES.get(str(benchmark), benchmark),
            "Run": label,
            "Latest": percent(newest["y"]),
            "95% interval": _interval(newest) or NONE,
            "At step": count(int(newest["step"])),
            "Best": percent(best["y"]),
            "Best at step": count(int(best["step"])),
        }
        rules = _rules(str(benchmark), published).itertuples()
        rows.append(row | {f"Published {rule.method}": percent(rule.y) for rule in rules})
    return pd.DataFrame(rows, dtype="str").fillna(NONE)


def _rules(benchmark: str, published: pd.DataFrame) -> pd.DataFrame:
    """Rows (method, y, label): published values of a benchmark."""
    rules = published[published["benchmark"] == benchmark][["method", "y"]].reset_index(drop=True)
    return rules.assign(label=[f"{rule.method} {percent(rule.y)}" for rule in rules.itertuples()])


def _interval(row: Mapping[Any, Any]) -> str:
    """Empty where it is not known."""
    return f"{percent(row['low'])} to {percent(row['high'])}" if known(row["low"]) and known(row["high"]) else ""


def _words(frame: pd.DataFrame, metric: str) -> str:
    if frame.empty:
        return "No evaluations."
    parts = []
    for label, scores in frame.groupby("series", sort=False):
        row = scores.loc[scores["step"].idxmax()]
        interval = f" ({bounds})" if (bounds := _interval(row)) else ""
        parts.append(f"{label}: {metric} {percent(row['y'])}{interval} at step {count(int(row['step']))}")
    return "; ".join(parts) + "."


def most_accurate(comparison: Response, most: int) -> Response:
    """The comparison with so many configurations, the first of the ranking, and the baseline."""
    kept = {comparison["baseline"], *comparison["ranking"][:most]}
    return {**comparison, "groups": [group for group in comparison["groups"] if group["name"] in kept]}


def comparison_chart(comparison: Response, x: str) -> Chart:
    """Mean accuracy of each configuration with its band; smoothed lines have none."""
    rows, smoothing = [], comparison["smoothing"]
    for group in comparison["groups"]:
        mean = group["mean"]
        low, high = ([None] * len(mean["steps"]) if smoothing else mean[name] for name in base.BOUNDS)
        columns = (mean[COST_OF[x]], mean["smoothed"], low, high, mean["steps"])
        rows += [(group["name"], *map(number, values)) for values in zip(*columns, strict=True)]
    names = [group["name"] for group in comparison["groups"]]
    metric, level = comparison["metric"], percent(comparison["level"], 0)
    parts = [f"{group['name']} {percent(number(group['final']['accuracy']))}" for group in comparison["groups"]]
    band = f"Band: {level} over seeds; over problems where there is one seed."
    return Chart(
        "compare-accuracy",
        f"{metric} on {', '.join(comparison['benchmarks'])}",
        {"layer": base.interval_layers(names, metric, x, bounds=not smoothing)},
        {"points": base.typed_frame(rows, **base.POINTS)},
        f"Mean {metric} of each configuration over {base.AXES[x]}{'' if smoothing else f' with {level} bands'}",
        f"Last evaluations: {', '.join(parts)}.",
        "Bands are drawn without smoothing." if smoothing else band,
        height=base.height_with_legend(names, 380),
        x=x,
        labels={"y": metric, **{name: f"{level} {name}" for name in base.BOUNDS}},
        smoothing=smoothing,
    )


def gates(comparison: Response) -> dict[str, Response]:
    """Runs whose gate can fire by their series: the first seed of each configuration, then the second, and so on."""
    by_seed = zip_longest(*([(group, run) for run in group["runs"]] for group in comparison["groups"]))
    members = [member for seeds in by_seed for member in seeds if member and member[1]["gate"]["threshold"] is not None]
    return {
        group["name"] if len(group["runs"]) == 1 else f"{group['name']}, seed {run['seed']}": run
        for group, run in members
    }


def gate_chart(runs: Mapping[str, Response], z: Mapping[str, Points]) -> Chart:
    """z-scores with their thresholds, never smoothed. runs: of `gates`; z: by run."""
    limits, states = {}, []
    for name, run in runs.items():
        gate = run["gate"]
        tau, shutoff = number(gate["threshold"]), gate["shutoff_step"]
        if run["id"] in z and known(tau):
            limits[tau] = f"τ = {figure(tau)}"
            if gate["two_sided"]:
                limits[-tau] = f"−τ = {figure(-tau)}"
        missing = "did not fire" if run["state"] in TERMINAL else "not yet"
        states.append(f"{name} " + (missing if shutoff is None else f"at step {count(shutoff)}"))
    names = {run["id"]: name for name, run in runs.items() if run["id"] in z}
    data = base.line_data(z, names)
    return Chart(
        "compare-gate",
        "Gates: z-scores",
        {"layer": [*base.line_layers(list(names.values()), "step", base.Z_SCORE), *base.threshold_layers()]},
        {**data, "rules": base.typed_frame(limits.items(), **base.LABELS)},
        f"z-scores of runs with a gate over {base.AXES['step']}",
        f"Shut off: {', '.join(states)}.",
        "Not smoothed.",
        x="step",
        height=base.height_with_legend(list(names.values())),
        thinned=base.thinned(*z.values()),
    )


CELL_VALUES = {
    "final": "last accuracy",
    "best": "best accuracy",
    "steps_to_best": "steps to best",
    "backward_passes_to_best": "backward passes to best",
    "hours_to_best": "hours to best",
    "shutoff_step": "shut-off step",
}


def heat_map_chart(heat_map: Response) -> Chart:
    """Heat map of a sweep over two settings, with the mean in each cell."""
    shown = CELL_VALUES[heat_map["show"]]
    if heat_map["show"] != "shutoff_step":
        shown += f" ({heat_map['metric']} on {', '.join(heat_map['benchmarks'])})"
    low_is_best = heat_map["show"].endswith("_to_best")
    say = percent if heat_map["show"] in ("final", "best") else figure
    x_names, y_names = (
        [value if isinstance(value, str) else json.dumps(value) for value in heat_map[f"{axis}_values"]]
        for axis in "xy"
    )
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
        f"{shown[:1].upper()}{shown[1:]}: {heat_map['y']} × {heat_map['x']}",
        {
            "layer": [
                base.layer("points", "rect", cell_place, invalid=None, stroke=base.MUTED, strokeWidth=0.5),
                base.layer("points", "text", words, fontSize=15, fontWeight=600, color=CELL_TEXT),
            ]
        },
        {"points": frame},
        f"Heat map of {shown} over {heat_map['x']} and {heat_map['y']}",
        f"{word} {shown}: {best[3]} at {at}.{mixed}" if best else "No value.",
        "Cells may differ in backward passes; the ranking above compares at equal ones." if say is percent else "",
        height=110 + 60 * len(y_names),
        labels={"x": heat_map["x"], "y": heat_map["y"], "value": f"mean {shown}"},
    )


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
