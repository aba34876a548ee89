"""Benchmark charts: scores with confidence intervals over training, with published results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from gxpo_client.formats import count, percent
from gxpo_dashboard.charts.base import AXES, MUTED, POINTS, Chart, interval_layers, layer, quantity, typed_frame
from gxpo_dashboard.view_models.series import EVEN, number

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
_MOST_DRAWN = 300
"""Evaluations of a line, each of which the browser draws as a mark."""


def scores_frame(
    evaluations: Iterable[Mapping[str, Any]], metric: str, label: str, at: Mapping[int, float] | None = None
) -> pd.DataFrame:
    """Evaluation records of a run as rows; `low` and `high` are the 95% interval over problems, NaN if unknown.

    at: step → position on the x-axis, None for the step itself; records without a position are omitted.
    """
    names = (metric, f"{metric}/ci_low", f"{metric}/ci_high")
    rows = []
    for record in evaluations:
        step, scores = int(record["step"]), record["scores"]
        if metric in scores and (at is None or step in at):
            values = [number(scores.get(name)) for name in names]
            rows.append((record["benchmark"], label, step if at is None else at[step], *values, step))
    return typed_frame(rows, benchmark="str", **POINTS)


def metrics_of(evaluations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The scores of evaluations, in order."""
    return sorted_scores({name for record in evaluations for name in record["scores"] if "/" not in name})


def sorted_scores(names: Iterable[str]) -> list[str]:
    """Those of the names that are scores: `pass@k`, then `maj@n`, in ascending order."""
    scores = [name for name in names if "@" in name]
    return sorted(scores, key=lambda name: (name.partition("@")[0] != "pass", int(name.partition("@")[2] or 0)))


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
    own = frame[frame["benchmark"] == benchmark]
    rules = _rules(benchmark, published)
    place = {"y": quantity(), "tooltip": [{"field": "label", "title": "published"}]}
    title, present = TITLES.get(benchmark, benchmark), [name for name in names if name in set(own["series"])]
    chart = _chart(f"benchmark-{benchmark}", f"{title}: {metric}", own, present, metric, x)
    if rules.empty:
        return chart
    return replace(
        chart,
        spec={"layer": [*chart.spec["layer"], layer("rules", "rule", place, strokeDash=[5, 4], color=MUTED)]},
        datasets={**chart.datasets, "rules": rules},
        summary=chart.summary + (f" Published: {', '.join(rules['label'])}." if len(own) else ""),
        note=f"{chart.note} Dashed: published.",
    )


def accuracy_chart(
    evaluations: Sequence[Mapping[str, Any]],
    metric: str = "pass@1",
    x: str = "step",
    at: Mapping[int, float] | None = None,
) -> Chart:
    """One run: every benchmark as a line with its interval; `at` as in scores_frame."""
    frame = scores_frame(evaluations, metric, "", at)
    frame["series"] = frame["benchmark"].map(lambda name: TITLES.get(name, name)).astype("str")
    # Line by line, in the order of the benchmarks.
    frame = pd.concat([rows for _, rows in frame.groupby("series", sort=False)] or [frame], ignore_index=True)
    names = list(dict.fromkeys(frame["series"]))
    return _chart(f"accuracy-{metric}", f"Benchmark accuracy ({metric})", frame, names, metric, x)


def _chart(key: str, title: str, frame: pd.DataFrame, names: Sequence[str], metric: str, x: str) -> Chart:
    drawn, thinned = _drawn(frame)
    return Chart(
        key,
        title,
        {"layer": interval_layers(names, metric, x)},
        {"points": drawn},
        f"{title} over {AXES[x]} with 95% intervals",
        _words(frame, metric),
        "Shaded: 95% interval over problems.",
        x=x,
        labels={"y": metric, "low": "95% low", "high": "95% high"},
        thinned=thinned,
    )


def _drawn(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Evenly spaced rows of each line, and its last one; and what they are thinned to, empty for all rows."""
    lines = frame.groupby("series")["step"]
    place, size = lines.cumcount(), lines.transform("size")
    drawn = frame[(place % -(-size // _MOST_DRAWN) == 0) | (place == size - 1)]
    return drawn.drop(columns=["benchmark"]), EVEN if len(drawn) < len(frame) else ""


def score_table(frame: pd.DataFrame, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """Latest and best score per run and benchmark, with the published values of one model."""
    rows = []
    for (benchmark, label), scores in frame.groupby(["benchmark", "series"], sort=False):
        newest, best = scores.loc[scores["step"].idxmax()], scores.loc[scores["y"].idxmax()]
        row = {
            "Benchmark": TITLES.get(str(benchmark), benchmark),
            "Run": label,
            "Latest": newest["y"],
            "95% low": newest["low"],
            "95% high": newest["high"],
            "At step": newest["step"],
            "Best": best["y"],
            "Best at step": best["step"],
        }
        rules = _rules(str(benchmark), published).itertuples()
        rows.append(row | {f"Published {rule.method}": rule.y for rule in rules})
    return pd.DataFrame(rows)


def _rules(benchmark: str, published: pd.DataFrame | None) -> pd.DataFrame:
    """Rows (method, y, label): published values of a benchmark."""
    if published is None or published.empty:
        return typed_frame([], method="str", y="float64", label="str")
    rules = published[published["benchmark"] == benchmark][["method", "y"]].reset_index(drop=True)
    return rules.assign(label=[f"{rule.method} {percent(rule.y)}" for rule in rules.itertuples()])


def _words(frame: pd.DataFrame, metric: str) -> str:
    if frame.empty:
        return "No evaluations yet."
    parts = []
    for label, scores in frame.groupby("series", sort=False):
        row = scores.loc[scores["step"].idxmax()]
        interval = f"{percent(row['low'])} to {percent(row['high'])}"
        parts.append(f"{label}: {metric} {percent(row['y'])} ({interval}) at step {count(row['step'])}")
    return "; ".join(parts) + "."
