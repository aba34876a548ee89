"""What the service worked out arrives in the pictures unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gxpo_dashboard.charts import benchmarks, compare
from gxpo_dashboard.view_models.series import Points

Json = dict[str, Any]


def curve(steps: list[int], accuracy: list[float], per_step: float = 1.0) -> Json:
    return {
        "steps": steps,
        "backward_passes": [per_step * step for step in steps],
        "hours": [step / 10 for step in steps],
        "tokens": [100 * step for step in steps],
        "accuracy": accuracy,
        "smoothed": [value + 0.001 for value in accuracy],
        "low": [value - 0.02 for value in accuracy],
        "high": ["NaN", *[value + 0.02 for value in accuracy[1:]]],
    }


Z = {"gxpo 0": Points([2, 3], [2.0, 3.0], [0.1, 0.7]), "gxpo 1": Points([2, 3], [2.0, 3.0], [math.nan, 0.2])}


def run(name: str, seed: int, curve: Json, shutoff: int | None = None, tau: Any = 0.5) -> Json:
    gate = {"steps": [], "z": [], "threshold": tau, "shutoff_step": shutoff, "two_sided": False}
    return {"id": f"{name} {seed}", "seed": seed, "curve": curve, "gate": gate}


def answer() -> Json:
    grpo, gxpo = curve([0, 10], [0.2, 0.3]), curve([0, 10], [0.2, 0.4], 3.0)
    final = {"accuracy": 0.3}
    return {
        "metric": "pass@1",
        "benchmarks": ["gsm8k"],
        "smoothing": 0.0,
        "level": 0.95,
        "groups": [
            {"name": "GRPO", "mean": grpo, "final": final, "runs": [run("grpo", 0, grpo, tau=None)]},
            {
                "name": "GXPO K=5",
                "mean": gxpo,
                "final": {"accuracy": 0.4},
                "runs": [run("gxpo", 0, gxpo, shutoff=3), run("gxpo", 1, gxpo)],
            },
        ],
        "settings": [{"setting": "learner.rule.k", "values": {"GRPO": None, "GXPO K=5": "5"}}],
    }


@pytest.mark.parametrize(("x", "last"), [("step", 10.0), ("backward_passes", 30.0), ("time", 1.0), ("tokens", 1000.0)])
def test_the_axis_is_the_cost_that_was_chosen(x: str, last: float) -> None:
    frame = compare.curves_frame(answer(), x)
    assert frame[frame["series"] == "GXPO K=5"]["x"].tolist() == [0.0, last]


def test_the_smoothed_values_are_drawn_with_their_bounds() -> None:
    frame = compare.curves_frame(answer(), "step")
    row = frame[(frame["series"] == "GXPO K=5") & (frame["x"] == 10)].iloc[0]
    assert (row["y"], row["low"], row["high"]) == pytest.approx((0.401, 0.38, 0.42))
    assert math.isnan(frame.iloc[0]["high"])


def test_each_seed_is_drawn_when_asked_for() -> None:
    chart = compare.accuracy_chart(answer(), "step", seeds=True)
    assert chart.datasets["seeds"]["seed"].tolist() == ["0", "0", "0", "0", "1", "1"]
    assert "seeds" not in compare.accuracy_chart(answer(), "step").datasets


@pytest.mark.parametrize("seeds", [False, True])
def test_new_data_does_not_change_the_specification(seeds: bool) -> None:
    longer = answer()
    for group in longer["groups"]:
        group["mean"] = curve([0, 10, 20], [0.2, 0.3, 0.9])
    before, after = (compare.accuracy_chart(each, "step", seeds) for each in (answer(), longer))
    assert (before.spec, before.alt) == (after.spec, after.alt)


def test_gates_keep_every_seed_apart_and_each_threshold_once() -> None:
    chart = compare.gate_chart(answer(), Z)
    assert chart.points["series"].unique().tolist() == ["GXPO K=5, seed 0", "GXPO K=5, seed 1"]
    assert chart.points["y"].tolist()[:2] == [0.1, 0.7]
    assert chart.datasets["rules"].to_dict("records") == [{"y": 0.5, "label": "τ = 0.5"}]
    assert chart.summary == "Shut off: GXPO K=5, seed 0 at step 3, GXPO K=5, seed 1 not yet."


def test_the_table_of_accuracy_has_the_bounds_of_each_band() -> None:
    table = compare.accuracy_chart(answer(), "step").table()
    bounds = ("", ", 95% low", ", 95% high")
    assert list(table.columns) == [
        "Training step",
        *(f"{name}{bound}" for name in ("GRPO", "GXPO K=5") for bound in bounds),
    ]
    assert table["GXPO K=5, 95% low"].tolist() == pytest.approx([0.18, 0.38])
    assert math.isnan(table["GRPO, 95% high"][0])
    assert table["GRPO, 95% high"][1] == pytest.approx(0.32)


def test_the_table_over_a_cost_has_the_step_of_each_evaluation() -> None:
    table = compare.accuracy_chart(answer(), "backward_passes").table()
    # 10 steps of one backward pass, and 10 of three; both start at step 0.
    assert table[["Backward passes", "Step"]].to_numpy().tolist() == [[0, 0], [10, 10], [30, 10]]
    assert table["GRPO"].tolist()[:2] == pytest.approx([0.201, 0.301])
    assert math.isnan(table["GRPO"][2])


def test_settings_that_differ_are_rows() -> None:
    (row,) = compare.settings_table(answer()).to_dict("records")
    assert row == {"Setting": "learner.rule.k", "GRPO": "–", "GXPO K=5": "5"}


def test_header_cells_that_repeat_stay_apart() -> None:
    table = {"title": "t", "header": ["run", "shut-off step", "best", "best"], "rows": [["a", "–", "1", "2"]]}
    assert list(compare.text_table(table).columns) == ["Run", "Shut-off step", "Best", "Best (2)"]
    assert compare.text_table({**table, "rows": []}).empty


def heat() -> Json:
    interval = {"mean": 0.41, "low": 0.4, "high": 0.42, "num": 3}
    return {
        "group": "g1",
        "x": "learner.rule.alpha",
        "y": "learner.rule.k",
        "show": "final",
        "metric": "pass@1",
        "x_values": [0.1, 0.5],
        "y_values": [3, "Infinity"],
        "cells": [
            {"x": 0, "y": 0, "value": {**interval, "mean": 0.2, "low": None}, "runs": ["r1"]},
            {"x": 1, "y": 1, "value": interval, "runs": ["r2", "r3", "r4"]},
            {"x": 0, "y": 1, "value": None, "runs": ["r5"]},
        ],
        "mixed": ["learner.zero_stage"],
    }


def test_heat_map_cells_lie_at_their_values_and_the_best_is_named() -> None:
    chart = compare.heat_map_chart(heat())
    assert chart.points[["x", "y", "text", "runs"]].to_numpy().tolist() == [
        ["0.1", "3", "20.0%", 1],
        ["0.5", "Infinity", "41.0%", 3],
        ["0.1", "Infinity", "–", 1],
    ]
    assert chart.points["interval"].tolist() == ["", "40.0% to 42.0%", ""]
    assert chart.summary == (
        "Highest: 41.0% at learner.rule.alpha = 0.5, learner.rule.k = Infinity. "
        "Each cell also averages over learner.zero_stage."
    )


def test_costs_are_not_written_as_shares() -> None:
    steps = heat() | {"show": "steps_to_best"}
    steps["cells"][0]["value"]["mean"] = 210
    steps["cells"][1]["value"] |= {"mean": 180, "low": None, "high": None}
    chart = compare.heat_map_chart(steps)
    assert chart.points["text"].tolist() == ["210", "180", "–"]
    # Fewer steps are better: they are named, and darker.
    assert chart.summary.startswith("Lowest: 180 at learner.rule.alpha = 0.5")
    ranges = [
        c.spec["layer"][0]["encoding"]["color"]["scale"]["range"] for c in (chart, compare.heat_map_chart(heat()))
    ]
    assert ranges[0] == ranges[1][::-1]


def test_parallel_coordinates_place_settings_by_rank_and_accuracy_by_value() -> None:
    def run(name: str, k: int, rate: float, score: float | str) -> dict[str, object]:
        return {"name": name, "score": score, "group_values": {"k": k, "rate": rate}}

    runs = [run("a", 3, 1e-5, 0.2), run("b", 10, 1e-4, 0.5), run("c", 5, 1e-3, 0.3), run("d", 5, 1e-3, "NaN")]
    chart = compare.parallel_chart(runs, ["k", "rate"])
    frame = chart.points
    places = {(row.series, row.axis): row.y for row in frame.itertuples()}
    assert [places[name, "k"] for name in "abc"] == [0.0, 1.0, 0.5]
    assert [places[name, "rate"] for name in "abc"] == [0.0, 0.5, 1.0]
    # 0.3 lies a third of the way from 0.2 to 0.5.
    assert [places[name, "accuracy"] for name in "abc"] == [0.0, 1.0, pytest.approx(1 / 3)]
    assert "d" not in set(frame["series"])
    assert chart.summary == "Highest: 50.0% in b."
    assert compare.parallel_chart([], ["k", "rate"]).points.empty


# Scores with confidence intervals and published results.


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


def test_many_evaluations_are_drawn_evenly_spaced_with_the_last_one() -> None:
    chart = benchmarks.accuracy_chart([record(step, 0.5) for step in range(1000)])
    # 1000 / 300, rounded up: every fourth.
    assert chart.points["step"].tolist() == [*range(0, 1000, 4), 999]
    assert "evenly spaced steps" in chart.thinning
    assert not benchmarks.accuracy_chart([record(step, 0.5) for step in range(300)]).thinned


def test_benchmarks_of_a_run_are_lines_of_a_chart_and_each_score_has_a_chart() -> None:
    records = [record(0, 0.2), record(0, 0.9, "amc23"), record(10, 0.3)]
    assert benchmarks.accuracy_chart(records).points["series"].tolist() == ["GSM8K", "GSM8K", "AMC23"]
    assert len({benchmarks.accuracy_chart(records, metric).key for metric in ("pass@1", "pass@2")}) == 2
