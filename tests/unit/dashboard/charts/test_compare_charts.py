"""What the service worked out arrives in the pictures unchanged."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from gxpo_client.client import Client, connect
from gxpo_dashboard.charts import scores
from gxpo_dashboard.session import visitor
from gxpo_dashboard.view_models.series import EVEN, Points
from gxpo_dashboard.views import benchmarks, compare

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


def answer() -> Json:
    grpo, gxpo = curve([0, 10], [0.2, 0.3]), curve([0, 10], [0.2, 0.4], 3.0)
    groups = [
        {"name": "GRPO", "mean": grpo, "final": {"accuracy": 0.3}},
        {"name": "GXPO K=5", "mean": gxpo, "final": {"accuracy": 0.4}},
    ]
    return {"metric": "pass@1", "benchmarks": ["gsm8k"], "smoothing": 0.0, "level": 0.95, "groups": groups}


@pytest.mark.parametrize(("x", "last"), [("step", 10.0), ("backward_passes", 30.0), ("time", 1.0), ("tokens", 1000.0)])
def test_smoothed_values_are_drawn_with_their_bounds_over_the_cost_that_was_chosen(x: str, last: float) -> None:
    frame = scores.comparison_chart(answer(), x).points
    first, row = frame[frame["series"] == "GXPO K=5"].to_dict("records")
    assert (first["x"], row["x"]) == (0.0, last)
    assert (row["y"], row["low"], row["high"]) == pytest.approx((0.401, 0.38, 0.42))
    assert math.isnan(first["high"])


def test_a_smoothed_line_has_no_band_that_it_could_leave() -> None:
    chart = scores.comparison_chart(answer() | {"smoothing": 0.9}, "step")
    assert chart.points[["low", "high"]].isna().all(axis=None)
    assert "Exponential average, weight 0.9." in chart.text
    assert list(chart.table().columns) == ["Series", "Training step", "pass@1", "Average, weight"]
    assert not {"95% low", "95% high"} & {
        field.get("title") for field in chart.spec["layer"][-1]["encoding"]["tooltip"]
    }


def test_of_many_configurations_the_most_accurate_and_the_baseline_are_drawn() -> None:
    names = ["A", "B", "C", "D"]
    groups = [{"name": name} for name in names]
    whole = {"groups": groups, "ranking": ["D", "B", "A", "C"], "baseline": "A"}
    for most, kept in {1: ["A", "D"], 2: ["A", "B", "D"], 4: names}.items():
        drawn = scores.most_accurate(whole, most)
        assert [group["name"] for group in drawn["groups"]] == kept


def test_more_evaluations_do_not_change_the_specification() -> None:
    longer = answer()
    longer["groups"][0]["mean"] = curve([0, 10, 20], [0.2, 0.3, 0.9])
    before, after = (scores.comparison_chart(each, "step") for each in (answer(), longer))
    assert (before.spec, before.alt) == (after.spec, after.alt)


def test_the_table_has_the_bounds_of_each_band_and_over_a_cost_the_step_of_each_evaluation() -> None:
    table = scores.comparison_chart(answer(), "step").table()
    assert list(table.columns) == ["Series", "Training step", "pass@1", "95% low", "95% high"]
    assert table[table["Series"] == "GXPO K=5"]["95% low"].tolist() == pytest.approx([0.18, 0.38])
    table = scores.comparison_chart(answer(), "backward_passes").table()
    # 10 steps of one backward pass, and 10 of three; both start at step 0.
    assert table[["Backward passes", "Step"]].to_numpy().tolist() == [[0, 0], [10, 10], [0, 0], [30, 10]]


# Gates.


def gated(
    name: str, *seeds: int, tau: float | str | None = 0.5, shutoff: int | None = None, state: str = "running"
) -> Json:
    gate = {"threshold": tau, "shutoff_step": shutoff, "two_sided": False}
    runs = [{"id": f"{name} {seed}", "seed": seed, "gate": gate, "state": state} for seed in seeds]
    return {"name": name, "runs": runs}


def test_each_configuration_has_its_first_gate_before_any_has_its_second() -> None:
    groups = [gated("GRPO", 0, 1, tau=None), gated("A", 0, 1, 2), gated("B", 0, tau="Infinity")]
    runs = scores.gates({"groups": groups})
    assert {series: run["id"] for series, run in runs.items()} == {
        "A, seed 0": "A 0", "B": "B 0", "A, seed 1": "A 1", "A, seed 2": "A 2",
    }  # fmt: skip
    assert list(runs) == ["A, seed 0", "B", "A, seed 1", "A, seed 2"]


def test_gates_keep_every_seed_apart_and_each_threshold_once() -> None:
    ended = gated("C", 0, tau="Infinity", state="succeeded")
    runs = scores.gates({"groups": [gated("A", 0, 1), gated("B", 0, shutoff=3), ended]})
    z = {name: Points([2, 3], [2.0, 3.0], [0.1, 0.7]) for name in ("A 0", "A 1", "B 0", "C 0")}
    chart = scores.gate_chart(runs, z)
    assert chart.points["series"].unique().tolist() == ["A, seed 0", "B", "C", "A, seed 1"]
    assert chart.points["y"].tolist()[:2] == [0.1, 0.7]
    assert chart.datasets["rules"].to_dict("records") == [{"y": 0.5, "label": "τ = 0.5"}]
    assert chart.summary == "Shut off: A, seed 0 not yet, B at step 3, C did not fire, A, seed 1 not yet."


def heat() -> Json:
    interval = {"mean": 0.41, "low": 0.4, "high": 0.42, "num": 3}
    cells = [
        {"x": 0, "y": 0, "value": {**interval, "mean": 0.2, "low": None}, "runs": ["r1"]},
        {"x": 1, "y": 1, "value": interval, "runs": ["r2", "r3", "r4"]},
        {"x": 0, "y": 1, "value": None, "runs": ["r5"]},
    ]
    axes = {"x": "learner.rule.alpha", "y": "learner.rule.k", "x_values": [0.1, 0.5], "y_values": [3, "Infinity"]}
    score = {"metric": "pass@1", "benchmarks": ["gsm8k", "amc23"]}
    return {"group": "g1", "show": "final", **score, "cells": cells, "mixed": ["learner.zero_stage"], **axes}


def test_heat_map_cells_lie_at_their_values_and_the_best_is_named() -> None:
    chart = scores.heat_map_chart(heat())
    assert chart.points[["x", "y", "text", "runs"]].to_numpy().tolist() == [
        ["0.1", "3", "20.0%", 1],
        ["0.5", "Infinity", "41.0%", 3],
        ["0.1", "Infinity", "–", 1],
    ]
    assert chart.points["interval"].tolist() == ["", "40.0% to 42.0%", ""]
    assert chart.summary == (
        "Highest last accuracy (pass@1 on gsm8k, amc23): 41.0% at learner.rule.alpha = 0.5, learner.rule.k = Infinity. "
        "Each cell also averages over learner.zero_stage."
    )
    assert chart.note.startswith("Cells may differ in backward passes")


@pytest.mark.parametrize(
    ("show", "what"),
    [
        ("final", "last accuracy (pass@1 on gsm8k, amc23)"),
        ("hours_to_best", "hours to best (pass@1 on gsm8k, amc23)"),
        ("shutoff_step", "shut-off step"),
    ],
)
def test_title_alternative_text_and_file_of_a_heat_map_name_the_value_in_its_cells(show: str, what: str) -> None:
    chart = scores.heat_map_chart(heat() | {"show": show})
    settings = ("learner.rule.k", "learner.rule.alpha")
    assert chart.title == f"{what[0].upper()}{what[1:]}: {' × '.join(settings)}"
    assert chart.alt == f"Heat map of {what} over {' and '.join(settings[::-1])}"
    assert f"Mean {what}" in chart.table()


def test_columns_of_one_name_are_numbered() -> None:
    table = {"header": ["run", "k", "Run", "run"], "rows": [["a", "1", "b", "c"]]}
    assert scores.text_table(table).columns.tolist() == ["Run", "K", "Run (2)", "Run (3)"]


def test_costs_are_not_written_as_shares() -> None:
    steps = heat() | {"show": "steps_to_best"}
    steps["cells"][0]["value"]["mean"] = 210
    steps["cells"][1]["value"] |= {"mean": 180, "low": None, "high": None}
    chart = scores.heat_map_chart(steps)
    assert chart.points["text"].tolist() == ["210", "180", "–"]
    assert chart.note == ""
    # Fewer steps are better: they are named, and darker.
    assert chart.summary.startswith("Lowest steps to best (pass@1 on gsm8k, amc23): 180 at learner.rule.alpha = 0.5")
    ranges = [c.spec["layer"][0]["encoding"]["color"]["scale"]["range"] for c in (chart, scores.heat_map_chart(heat()))]
    assert ranges[0] == ranges[1][::-1]


# Scores with confidence intervals and published results.


def record(step: int, value: float, benchmark: str = "gsm8k", **scores: float) -> Json:
    interval = {"pass@1/ci_low": value - 0.1, "pass@1/ci_high": value + 0.1}
    return {"step": step, "benchmark": benchmark, "scores": {"pass@1": value, **interval, **scores}}


ROWS = [
    {"model": "M", "method": "grpo", "k": None, "scores": {"gsm8k": 43.53, "amc23": None}},
    {"model": "M", "method": "gxpo", "k": 3, "scores": {"gsm8k": 51.49}},
    {"model": "N", "method": "grpo", "k": None, "scores": {"gsm8k": 78.73}},
]
OTHERS = {"name": "convergence", "rows": [{"method": "grpo"}]}
PUBLISHED = {"tables": [OTHERS, {"name": "sampled_pass@1", "rows": ROWS}]}


def test_published_scores_become_shares() -> None:
    published = scores.published_scores(PUBLISHED)
    assert published[["model", "method", "benchmark"]].to_numpy().tolist() == [
        ["M", "GRPO", "gsm8k"],
        ["M", "GXPO K=3", "gsm8k"],
        ["N", "GRPO", "gsm8k"],
    ]
    assert published["y"].round(4).tolist() == [0.4353, 0.5149, 0.7873]
    assert scores.published_scores({"tables": []}).empty


def test_scores_are_told_from_other_metrics_and_sorted() -> None:
    names = ["maj@4", "pass@16", "pass@1/ci_low", "pass@k", "a@", "pass@1", "length"]
    assert scores.sorted_scores(names) == ["pass@1", "pass@16", "maj@4"]


def test_records_become_rows_with_their_interval_where_it_is_known() -> None:
    frame = scores.scores_frame([record(0, 0.25), record(10, 0.5)], "pass@1", "a", "step")
    assert frame[["x", "y", "low", "high"]].round(3).to_numpy().tolist() == [[0, 0.25, 0.15, 0.35], [10, 0.5, 0.4, 0.6]]
    unknown = {"step": 1, "benchmark": "b", "scores": {"maj@4": "NaN"}}
    frame = scores.scores_frame([unknown], "maj@4", "a", "step")
    assert math.isnan(frame["y"][0])
    assert math.isnan(frame["low"][0])
    (row,) = scores.score_table(frame, scores.published_scores({})).to_numpy().tolist()
    assert row == ["b", "a", "–", "–", "1", "–", "1"]
    assert scores.accuracy_chart([unknown], "maj@4", "step").summary == "b: maj@4 – at step 1."
    timed = [record(step, 0.5) | cost for step, cost in ((0, {"training_s": 0.0}), (5, {"training_s": 5400}), (9, {}))]
    assert scores.scores_frame(timed, "pass@1", "a", "time")[["x", "step"]].to_numpy().tolist() == [[0, 0], [1.5, 5]]


def test_the_chart_of_a_benchmark_holds_its_runs_and_its_published_values() -> None:
    frame = scores.scores_frame([record(0, 0.2), record(0, 0.9, "amc23")], "pass@1", "a", "step")
    published = scores.published_scores(PUBLISHED).query("model == 'M'")
    chart = scores.benchmark_chart("gsm8k", frame, "pass@1", ["a", "b"], published, "step")
    assert chart.points["y"].tolist() == [0.2]
    assert chart.datasets["rules"]["label"].tolist() == ["GRPO 43.5%", "GXPO K=3 51.5%"]
    own = "a: pass@1 20.0% (10.0% to 30.0%) at step 0."
    assert chart.summary == f"{own} Published: GRPO 43.5%, GXPO K=3 51.5%."


def test_a_part_of_a_long_line_has_the_evaluations_that_the_whole_leaves_out() -> None:
    evaluations = [record(step, 0.5) for step in range(300)]
    whole = scores.accuracy_chart(evaluations, "pass@1", "step")
    assert (whole.points["x"].tolist()[:3], whole.thinned) == ([0, 3, 6], EVEN)
    part = scores.accuracy_chart(evaluations, "pass@1", "step", (10, 20))
    assert (part.points["x"].tolist(), part.thinned) == ([*range(10, 21)], "")
    assert part.summary == whole.summary, "of the last evaluation"
    frame = scores.scores_frame(evaluations, "pass@1", "a", "step")
    chart = scores.benchmark_chart("gsm8k", frame, "pass@1", ["a"], scores.published_scores({}), "step", (10, 20))
    assert chart.points["x"].tolist() == [*range(10, 21)]


def test_the_table_gives_newest_and_best() -> None:
    frame = scores.scores_frame([record(0, 0.2), record(10, 0.5), record(20, 0.4)], "pass@1", "a", "step")
    row = scores.score_table(frame, scores.published_scores(PUBLISHED).query("model == 'N'")).iloc[0]
    assert row.tolist()[2:] == ["40.0%", "30.0% to 50.0%", "20", "50.0%", "10", "78.7%"]


def test_evaluations_of_several_runs_are_counted_from_the_end_of_a_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [record(step, 0.5) for step in (0, 100, 110)]
    monkeypatch.setattr(visitor, "client", lambda: Mock(evaluations=lambda run: rows))
    counted = {warm: benchmarks._evaluations({"id": "r0", "warm_steps": warm}) for warm in (0, 100)}
    assert {warm: [row["step"] for row in kept] for warm, kept in counted.items()} == {0: [0, 100, 110], 100: [0, 10]}


def test_a_run_that_has_an_evaluation_stands_for_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a2": ["eval/easy/pass@8"], "b": ["eval/hard/pass@1"]}
    service = Mock(metric_names=Mock(side_effect=lambda run: names.get(run, [])))
    monkeypatch.setattr(visitor, "client", lambda: service)
    evaluated = {"a1": None, "a2": 10, "a3": 20, "b": 5, "c": None}
    runs = {id: {"id": id, "group": "a" if id < "b" else None, "score_step": at} for id, at in evaluated.items()}
    assert sorted(compare._evaluated(runs)) == [["eval", "easy", "pass@8"], ["eval", "hard", "pass@1"]]
    assert {call.args[0] for call in service.metric_names.call_args_list} == {"a2", "b"}
    waiting = {run: {**view, "score_step": None} for run, view in runs.items()}
    assert len(compare._evaluated(waiting)) == 2, "whichever of them is evaluated first"


# The page goes on with the runs and evaluations that there are by now.


def _early() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_dashboard.views import benchmarks, compare

    st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
    if st.session_state["drawn"] == 1:
        benchmarks._await_evaluation({"r0": {"id": "r0", "warm_steps": 2}})
    elif st.session_state["drawn"] == 2:
        compare._comparison({"groups": []}, {"r0": {"id": "r0", "group": None, "score_step": None}}, awaited=True)


def test_a_first_evaluation_draws_the_page_with_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_warm_start = {"step": 0, "scores": {"pass@1": 0.5}}
    answers: dict[str, Any] = {"/evaluations": {"items": [before_the_warm_start]}, "/names": ["reward/mean"]}

    def answer(request: httpx.Request) -> httpx.Response:
        known = next((content for end, content in answers.items() if request.url.path.endswith(end)), None)
        return (
            httpx.Response(422, json={"title": "Invalid", "detail": "refused", "errors": [], "left_out": []})
            if (known is None)
            else httpx.Response(200, json=known)
        )

    http = connect("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(visitor, "client", lambda: Client(http, "token"))
    page = AppTest.from_function(_early).run(timeout=60)
    assert page.session_state["drawn"] == 1
    answers["/evaluations"] = {"items": [{"step": 2, "scores": {"pass@1": 0.5}}]}
    page.session_state["drawn"] = 0
    assert page.run(timeout=60).session_state["drawn"] == 2
    answers["/names"] = ["reward/mean", "eval/gsm8k/pass@1"]
    page.session_state["drawn"] = 1
    assert page.run(timeout=60).session_state["drawn"] == 3


def _growing() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_dashboard.views import compare

    st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
    known = {f"r{number}": {} for number in range(st.session_state["drawn"])}
    compare._comparison({"groups": ["g1"]}, known, awaited=False)


def test_a_run_that_a_group_has_since_is_drawn_by_the_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/groups/g1"):
            return httpx.Response(200, json={"runs": [{"id": id, "group_values": None} for id in ("r0", "r1")]})
        return httpx.Response(422, json={"title": "Invalid", "detail": "refused", "errors": [], "left_out": []})

    http = connect("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(visitor, "client", lambda: Client(http, "token"))
    page = AppTest.from_function(_growing).run(timeout=60)
    assert page.session_state["drawn"] == 2
    assert [error.value for error in page.error if "refused" in error.value]
