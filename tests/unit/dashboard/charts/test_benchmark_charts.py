"""Scores with confidence intervals and published results."""

from __future__ import annotations

import math
from typing import Any

from gxpo_dashboard.charts import benchmarks

Json = dict[str, Any]


def record(step: int, value: float, benchmark: str = "gsm8k", **scores: float) -> Json:
    interval = {"pass@1/ci_low": value - 0.1, "pass@1/ci_high": value + 0.1}
    return {"step": step, "benchmark": benchmark, "scores": {"pass@1": value, **interval, **scores}}


PUBLISHED = {
    "tables": [
        {"name": "convergence", "rows": [{"method": "grpo"}]},
        {
            "name": "sampled_pass@1",
            "rows": [
                {"model": "M", "method": "grpo", "k": None, "scores": {"gsm8k": 43.53, "amc23": None}},
                {"model": "M", "method": "gxpo", "k": 3, "scores": {"gsm8k": 51.49}},
                {"model": "N", "method": "grpo", "k": None, "scores": {"gsm8k": 78.73}},
            ],
        },
    ]
}


def test_published_scores_become_shares() -> None:
    published = benchmarks.published_scores(PUBLISHED)
    assert published[["model", "method", "benchmark"]].to_numpy().tolist() == [
        ["M", "GRPO", "gsm8k"],
        ["M", "GXPO K=3", "gsm8k"],
        ["N", "GRPO", "gsm8k"],
    ]
    assert published["y"].round(4).tolist() == [0.4353, 0.5149, 0.7873]
    assert benchmarks.published_scores({"tables": []}).empty


def test_records_become_rows_with_their_interval_where_it_is_known() -> None:
    frame = benchmarks.scores_frame([record(0, 0.25), record(10, 0.5)], "pass@1", "a")
    assert frame[["x", "y", "low", "high"]].round(3).to_numpy().tolist() == [[0, 0.25, 0.15, 0.35], [10, 0.5, 0.4, 0.6]]
    frame = benchmarks.scores_frame([{"step": 1, "benchmark": "b", "scores": {"maj@4": "NaN"}}], "maj@4", "a")
    assert math.isnan(frame["y"][0])
    assert math.isnan(frame["low"][0])


def test_scores_are_listed_by_kind_and_number() -> None:
    more = {"pass@16": 0.9, "maj@4": 0.3, "pass@2": 0.4, "length_mean": 12.0}
    assert benchmarks.metrics_of([record(0, 0.2, **more)]) == ["pass@1", "pass@2", "pass@16", "maj@4"]


def test_the_chart_of_a_benchmark_holds_its_runs_and_its_published_values() -> None:
    frame = benchmarks.scores_frame([record(0, 0.2), record(0, 0.9, "amc23")], "pass@1", "a")
    published = benchmarks.published_scores(PUBLISHED).query("model == 'M'")
    chart = benchmarks.benchmark_chart("gsm8k", frame, "pass@1", ["a", "b"], published)
    assert chart.points["y"].tolist() == [0.2]
    assert chart.datasets["rules"]["label"].tolist() == ["GRPO 43.5%", "GXPO K=3 51.5%"]
    assert chart.summary.endswith("Published: GRPO 43.5%, GXPO K=3 51.5%.")


def test_the_table_gives_newest_and_best() -> None:
    frame = benchmarks.scores_frame([record(0, 0.2), record(10, 0.5), record(20, 0.4)], "pass@1", "a")
    row = benchmarks.score_table(frame, benchmarks.published_scores(PUBLISHED).query("model == 'N'")).iloc[0]
    assert (row["Latest"], row["At step"], row["Best"], row["Best at step"]) == (0.4, 20, 0.5, 10)
    assert row["Published GRPO"] == 0.7873


def test_benchmarks_of_a_run_are_lines_of_a_chart_and_each_score_has_a_chart() -> None:
    records = [record(0, 0.2), record(0, 0.9, "amc23"), record(10, 0.3)]
    assert benchmarks.accuracy_chart(records).points["series"].tolist() == ["GSM8K", "GSM8K", "AMC23"]
    assert len({benchmarks.accuracy_chart(records, metric).key for metric in ("pass@1", "pass@2")}) == 2
