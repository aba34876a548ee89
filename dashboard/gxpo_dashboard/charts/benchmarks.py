"""Benchmark charts: scores with confidence intervals over training, with published results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from gxpo_client.formats import percent
from gxpo_dashboard.charts.base import (
    AXES,
    MUTED,
    Chart,
    Spec,
    color,
    layer,
    line_layers,
    quantity,
    typed_frame,
    x_encoding,
    y_encoding,
)
from gxpo_dashboard.view_models.series import number

TITLES = {
    "math500": "MATH-500",
    "amc23": "AMC23",
    "gsm8k": "GSM8K",
    "minerva": "Minerva Math",
    "olympiadbench": "OlympiadBench",
    "aime24": "AIME24",
    "word_problems": "Word problems (embedded)",
}


def title_of(benchmark: str) -> str:
    return TITLES.get(benchmark, benchmark)


def scores_frame(
    evaluations: Iterable[Mapping[str, Any]], metric: str, label: str, at: Mapping[int, float] | None = None
) -> pd.DataFrame:
    """Evaluation records of a run as rows; `low` and `high` are the 95% interval over problems, NaN if unknown.

    at: step → position on the x-axis, None for the step itself; records without a position are omitted.
    """
    rows = []
    for record in evaluations:
        scores = record["scores"]
        step = int(record["step"])
        if metric in scores and (at is None or step in at):
            value = number(scores[metric])
            low, high = number(scores.get(f"{metric}/ci_low")), number(scores.get(f"{metric}/ci_high"))
            rows.append(
                (str(record["benchmark"]), label, float(step) if at is None else at[step], value, low, high, step)
            )
    numbers = dict.fromkeys(("x", "y", "low", "high"), "float64")
    return typed_frame(rows, benchmark="str", series="str", **numbers, step="int64")


def metrics_of(evaluations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The scores of evaluations: `pass@k`, then `maj@n`, in ascending order."""
    found = {name for record in evaluations for name in record["scores"] if "@" in name and "/" not in name}
    return sorted(found, key=lambda name: (name.partition("@")[0] != "pass", int(name.partition("@")[2] or 0)))


def published_scores(answer: Mapping[str, Any]) -> pd.DataFrame:
    """Published sampled pass@1 as rows (model, method, benchmark, y in [0, 1])."""
    rows = []
    for table in answer.get("tables", []):
        if table.get("name") != "sampled_pass@1":
            continue
        for row in table["rows"]:
            method = row["method"].upper() + (f" K={row['k']}" if row.get("k") else "")
            rows += [
                (row["model"], method, name, value / 100) for name, value in row["scores"].items() if value is not None
            ]
    return typed_frame(rows, model="str", method="str", benchmark="str", y="float64")


def benchmark_chart(
    benchmark: str,
    frame: pd.DataFrame,
    metric: str,
    names: Sequence[str],
    published: pd.DataFrame | None = None,
    x: str = "step",
) -> Chart:
    """A benchmark over training: line and interval per run; published values as labelled rules."""
    mine = frame[frame["benchmark"] == benchmark]
    present = [name for name in names if name in set(mine["series"])]
    rules = _rules(benchmark, published)
    published_rules = layer(
        "rules",
        "rule",
        {"y": quantity(), "tooltip": [{"field": "label", "title": "published"}]},
        aria=False,
        strokeDash=[5, 4],
        color=MUTED,
    )
    return Chart(
        f"benchmark-{benchmark}",
        f"{title_of(benchmark)}: {metric}",
        {"layer": [interval_layer(present, metric, x), *score_lines(present, metric, x), published_rules]},
        {"points": mine.drop(columns=["benchmark"]), "rules": rules},
        f"{metric} on {title_of(benchmark)} over {AXES[x]} with 95% intervals",
        _words(mine, metric, rules),
        "Shaded: 95% interval over problems (bootstrap)." + (" Dashed: published." if len(rules) else ""),
        labels={"x": AXES[x], "y": metric, "low": "95% low", "high": "95% high"},
    )


def accuracy_chart(
    evaluations: Sequence[Mapping[str, Any]],
    metric: str = "pass@1",
    x: str = "step",
    at: Mapping[int, float] | None = None,
) -> Chart:
    """One run: every benchmark as a line with its interval; `at` as in scores_frame."""
    frames = [
        scores_frame([record for record in evaluations if record["benchmark"] == name], metric, title_of(name), at)
        for name in dict.fromkeys(record["benchmark"] for record in evaluations)
    ]
    frame = pd.concat(frames, ignore_index=True) if frames else scores_frame([], metric, "")
    names = list(dict.fromkeys(frame["series"]))
    return Chart(
        f"accuracy-{metric}",
        f"Benchmark accuracy ({metric})",
        {"layer": [interval_layer(names, metric, x), *score_lines(names, metric, x)]},
        {"points": frame.drop(columns=["benchmark"])},
        f"{metric} over {AXES[x]} with 95% intervals",
        _words(frame, metric, _rules("", None)),
        "Shaded: 95% interval over problems (bootstrap).",
        labels={"x": AXES[x], "y": metric, "low": "95% low", "high": "95% high"},
    )


def interval_layer(names: Sequence[str], metric: str, x: str = "step") -> Spec:
    """Bands from `low` to `high`; points without an interval leave a gap."""
    # The title of the lines: Vega would join two different ones, and drop that of all layers for a missing one.
    bounds = {"x": x_encoding(x), "y": quantity("low", title=metric), "y2": {"field": "high"}}
    band = layer("points", "area", {**bounds, "color": color(names, marks=True)}, aria=False, opacity=0.16)
    return {**band, "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}]}


def score_lines(names: Sequence[str], metric: str, x: str = "step") -> list[Spec]:
    bounds = [{"field": name, "title": f"95% {name}", "format": ".1%"} for name in ("low", "high")]
    return line_layers(names, x, y_encoding(metric, ".0%"), marks=True, form=".1%", more=bounds)


def score_table(frame: pd.DataFrame, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """Latest and best score per run and benchmark, with the published values of one model."""
    rows = []
    for (benchmark, label), found in frame.groupby(["benchmark", "series"], sort=False):
        newest, best = found.loc[found["step"].idxmax()], found.loc[found["y"].idxmax()]
        row = {
            "Benchmark": title_of(str(benchmark)),
            "Run": label,
            "Latest": newest["y"],
            "95% low": newest["low"],
            "95% high": newest["high"],
            "At step": newest["step"],
            "Best": best["y"],
            "Best at step": best["step"],
        }
        for entry in _rules(str(benchmark), published).itertuples():
            row[f"Published {entry.method}"] = entry.y
        rows.append(row)
    return pd.DataFrame(rows)


def _rules(benchmark: str, published: pd.DataFrame | None) -> pd.DataFrame:
    if published is None or published.empty:
        return typed_frame([], method="str", y="float64", label="str")
    found = published[published["benchmark"] == benchmark][["method", "y"]].reset_index(drop=True)
    return found.assign(label=[f"{row.method} {percent(row.y)}" for row in found.itertuples()])


def _words(frame: pd.DataFrame, metric: str, rules: pd.DataFrame) -> str:
    if frame.empty:
        return "No evaluations yet."
    parts = []
    for label, found in frame.groupby("series", sort=False):
        row = found.loc[found["step"].idxmax()]
        interval = f"{percent(row['low'])} to {percent(row['high'])}"
        parts.append(f"{label}: {metric} {percent(row['y'])} ({interval}) at step {row['step']}")
    words = "; ".join(parts) + "."
    return words + (f" Published: {', '.join(rules['label'])}." if len(rules) else "")
