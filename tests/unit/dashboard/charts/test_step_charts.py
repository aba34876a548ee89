"""Backward passes by phase, parts of a step that sum to its time, and spans of several steps on one axis."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from gxpo_dashboard.charts import steps
from gxpo_dashboard.charts.base import Chart
from gxpo_dashboard.charts.steps import FALLBACK, LOOK_AHEAD
from gxpo_dashboard.view_models.rules import rules_of
from gxpo_dashboard.view_models.series import Points, Series
from gxpo_services.outputs.metric_series import thin
from gxpo_trainer.config import RunConfig

RULES = rules_of(RunConfig.model_json_schema())
GXPO = {"name": "gxpo", "k": 5, "probes": 2}


def points(steps: list[int], y: list[float]) -> Points:
    return Points(steps, [float(step) for step in steps], y)


# Three passes a step up to the step that fires (3), one a step from then on.
SHUT_OFF = {
    "update/backward_passes_total": points([1, 2, 3, 4, 5], [3, 6, 9, 10, 11]),
    "gate/active": points([1, 2, 3, 4, 5], [1, 1, 0, 0, 0]),
}


def test_the_step_that_fires_the_gate_still_looked_ahead() -> None:
    passes = steps.passes_by_phase(SHUT_OFF, RULES.of(GXPO)).pivot(index="x", columns="series", values="y")
    assert list(passes[LOOK_AHEAD]) == [3, 6, 9, 9, 9]
    assert list(passes[FALLBACK]) == [0, 0, 0, 1, 2]


def test_phases_of_a_long_run_after_a_warm_start_are_those_of_its_own_steps() -> None:
    # 200 supervised steps, 500 of three passes up to the one that fires the gate, and 1,000 of one pass.
    total = {200 + step: 3.0 * min(step, 500) + max(0, step - 500) for step in range(-199, 1501)}
    total |= dict.fromkeys(range(1, 201), 0.0)
    values = {
        "update/backward_passes_total": dict(sorted(total.items())),
        "gate/active": {step: float(step < 700) for step in range(201, 1701)},
    }
    series = {}
    for name, by_step in values.items():
        kept = thin(np.array([*by_step.values()]), 600)  # of different steps for the two
        series[name] = points([[*by_step][place] for place in kept], [[*by_step.values()][place] for place in kept])
    last = steps.passes_by_phase(series, RULES.of(GXPO)).groupby("series")["y"].last()
    # A point in three steps is left, and what is between two counts towards the later phase.
    assert last[LOOK_AHEAD] == pytest.approx(1500, abs=3 * 6)
    assert last.sum() == 2500


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        (GXPO, {"GRPO (1 per step)": 10.0, "SFPO K=5 (6 per step)": 60.0}),
        ({"name": "sfpo", "k": 3}, {"GRPO (1 per step)": 10.0, "GXPO (3 per step)": 30.0}),
        ({"name": "sfpo", "k": 3, "probes": 1}, {"GRPO (1 per step)": 10.0, "GXPO (2 per step)": 20.0}),
    ],
)
def test_a_run_is_compared_with_the_other_rules_at_its_settings(settings: Any, passes: dict[str, float]) -> None:
    drawn = steps.budget_chart({"update/backward_passes_total": points([10], [20])}, settings, None, RULES)
    others = drawn.datasets["others"].query("x == 10")
    assert dict(others[["series", "y"]].to_numpy().tolist()) == passes
    warm = {"update/backward_passes_total": points([200, 210], [0, 20])}
    others = steps.budget_chart(warm, settings, None, RULES, warm_steps=200).datasets["others"]
    assert dict(others.query("x == 210")[["series", "y"]].to_numpy().tolist()) == passes
    assert not others.query("x == 200")["y"].any(), "supervised steps cost no rule anything"


def test_a_long_run_has_few_points_to_hover_over_and_all_steps_in_its_areas() -> None:
    """A browser redraws each point at each refresh, and there are as many at a step as rules."""
    long = {"update/backward_passes_total": points(list(range(1, 602)), [3.0 * step for step in range(1, 602)])}
    chart = steps.budget_chart(long, GXPO, None, RULES)
    assert len(chart.datasets["own"].query("x > 0")) == 2 * 601
    assert chart.points["x"].nunique() == len(chart.datasets["others"].query("series.str.startswith('GRPO')")) - 1 == 86
    assert chart.points["x"].max() == 601
    assert "evenly spaced" in chart.processing


def test_the_budget_is_a_line_and_a_word() -> None:
    chart = steps.budget_chart(SHUT_OFF, GXPO, 200.0, RULES)
    assert chart.datasets["limit"].to_dict("records") == [{"y": 200.0, "label": "budget 200"}]
    spent = f"11 backward passes of 200 after 5 steps (9 in {LOOK_AHEAD}, 2 in {FALLBACK})"
    assert chart.summary == f"{spent}. Others: GRPO (1 per step): 5, SFPO K=5 (6 per step): 30."
    assert steps.budget_chart(SHUT_OFF, GXPO, None, RULES).datasets["limit"].empty


def test_a_single_step_has_an_area() -> None:
    one = {name: points(p.steps[:1], p.y[:1]) for name, p in SHUT_OFF.items()}
    own = steps.budget_chart(one, GXPO, None, RULES).datasets["own"]
    assert own[own["series"] == LOOK_AHEAD][["x", "y"]].to_numpy().tolist() == [[0, 0], [1, 3]]
    first = {name: points(p.steps[:1], p.y[:1]) for name, p in SERIES.items() if p.steps[0] == 1}
    chart = steps.step_time_chart(first, {})
    assert chart.datasets["areas"].query("series == 'update'")[["x", "y"]].to_numpy().tolist() == [[0, 2], [1, 2]]
    assert set(chart.points["x"]) == {1.0}


SERIES = {
    "time/step_s": points([1, 2], [4.0, 6.0]),
    "time/rollout_s": points([1, 2], [1.0, 2.0]),
    "time/update_s": points([1, 2], [2.0, 3.0]),
    "time/sync_s": points([1, 2], [0.5, 0.5]),
    "time/evaluate_s": points([2], [5.0]),
}
TOTALS = {name: (sum(series.y), len(series)) for name, series in SERIES.items()}


def test_the_rest_is_what_the_parts_leave_without_evaluation() -> None:
    wide = steps.step_parts(SERIES).pivot(index="x", columns="series", values="y")
    assert list(wide[steps.REST]) == [0.5, 0.5]
    assert list(wide.sum(axis=1)) == [4.0, 6.0]
    assert "evaluation" not in wide
    # Clocks that overlap leave no negative rest.
    parts = steps.step_parts({"time/step_s": points([1], [1.0]), "time/update_s": points([1], [1.2])})
    assert list(parts[parts["series"] == steps.REST]["y"]) == [0.0]


def test_means_and_shares_are_over_all_steps_and_evaluation_is_spread_over_them() -> None:
    # 10 s in two steps: 3 of sampling, 5 of update, 1 of sync, 1 of other; 5 s of evaluation besides.
    assert steps.step_time_chart(SERIES, TOTALS).summary == (
        "Mean: sampling 1.5 s (30%), update 2.5 s (50%), weight sync 0.5 s (10%), other 0.5 s (10%); "
        "outside of steps evaluation 2.5 s a step."
    )


def test_without_a_step_or_timeline_charts_say_so() -> None:
    assert steps.step_time_chart({}, {}).points.empty
    assert steps.step_time_chart({}, {"time/step_s": (0.0, 0)}).summary == "No steps."
    assert steps.budget_chart({}, GXPO, None, RULES).summary == "No steps."
    assert steps.timeline_chart([]).summary == "No timeline."


STEPS: list[dict[str, Any]] = [
    {"attempt": 2, "step": 7, "begin": 100.0, "spans": [
        {"process": "engine 0", "activity": "sampling", "begin": 0.0, "end": 2.0},
        {"process": "learner", "activity": "updating", "begin": 2.0, "end": 4.0},
    ]},
    {"attempt": 2, "step": 8, "begin": 104.0, "spans": [
        {"process": "engine 0", "activity": "syncing", "begin": 0.5, "end": 1.0},
    ]},
]  # fmt: skip


def test_seconds_count_from_the_first_step_the_learner_is_first_and_the_words_say_who_was_busy() -> None:
    chart = steps.timeline_chart(STEPS)
    assert chart.points.values.tolist() == [
        ["engine 0", "sampling", 0.0, 2.0, 7],
        ["learner", "updating", 2.0, 4.0, 7],
        ["engine 0", "syncing", 4.5, 5.0, 8],
    ]

    assert chart.spec["layer"][0]["encoding"]["y"]["sort"] == ["learner", "engine 0"]
    before = {"attempt": 1, "step": 7, "begin": 0.0, "spans": STEPS[0]["spans"]}
    assert steps.timeline_chart([before, *STEPS]).points.equals(chart.points), "without a pause between two attempts"
    # 2.5 of 5 seconds and 2 of 5.
    assert chart.summary == "Busy over the last 2 steps: engine 0 50%, learner 40%."


# The gate's pictures hold the right numbers: z, τ, window, phases and shut-off.


GATE_STEPS = [1, 2, 3, 4, 5]
GATE_SERIES = {
    # Fired at step 3: the state after steps 1 and 2 is on, after 3 and later off.
    "gate/active": points(GATE_STEPS, [1, 1, 0, 0, 0]),
    "gate/z": points([2, 3], [0.25, 2.5]),
    "gate/threshold": points(GATE_STEPS, [2.0] * 5),
    "gate/value": points(GATE_STEPS, [0.5, 0.6, 0.9, 0.7, 0.6]),
    "gate/mean": points(GATE_STEPS, [math.nan, 0.5, 0.55, 0.6, 0.62]),
    "gate/std": points(GATE_STEPS, [math.nan, 0.1, 0.05, 0.1, 0.02]),
    "gate/shutoff_step": points([3, 4, 5], [3.0, 3.0, 3.0]),
}


def z_chart(series: Series, x: str = "step", **gate: Any) -> Chart:
    return steps.z_chart(series, x, gate, "#4477aa")


def value_chart(series: Series) -> Chart:
    return steps.value_chart(series, "step", "gradient norm", "#4477aa")


def test_phases_change_at_the_step_that_fired_and_a_rearmed_gate_has_one_for_each_stretch() -> None:
    assert steps.phases(GATE_SERIES, "step").to_dict("records") == [{"x": 1.0, "x2": 3.0, "phase": LOOK_AHEAD}]
    intervals = steps.phases({"gate/active": points(GATE_STEPS, [1, 0, 0, 1, 1])}, "step")
    assert intervals[["x", "x2"]].to_numpy().tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_the_z_chart_marks_threshold_and_shutoff_and_both_limits_of_a_two_sided_gate() -> None:
    chart = z_chart(GATE_SERIES)
    assert chart.points[["x", "y"]].to_numpy().tolist() == [[2.0, 0.25], [3.0, 2.5]]
    assert chart.datasets["rules"].to_dict("records") == [{"y": 2.0, "label": "τ = 2"}]
    assert chart.datasets["shutoff"].to_dict("records") == [{"x": 3.0, "label": "shut off at step 3"}]
    assert chart.summary == "The gate fired at step 3; τ is 2. The maximum z-score was 2.5."
    falling = {**GATE_SERIES, "gate/z": points([2, 3], [0.25, -2.5])}
    chart = z_chart(falling, two_sided=True)
    assert chart.summary == "The gate fired at step 3; τ is ±2. The largest |z| was 2.5."
    # A gate that fired is drawn to that step: its label would lie on one at the right edge.
    (label,) = [
        part for part in chart.spec["layer"] if part["data"] == {"name": "rules"} and part["mark"]["type"] == "text"
    ]
    assert (label["encoding"]["x"], label["mark"]["align"]) == ({"value": 0}, "left")
    assert chart.datasets["rules"].to_numpy().tolist() == [[2.0, "τ = 2"], [-2.0, "−τ = −2"]]


def test_the_summary_names_an_infinite_threshold_the_warm_up_and_a_run_without_steps() -> None:
    chart = z_chart({**GATE_SERIES, "gate/threshold": points([1], [math.inf]), "gate/shutoff_step": Points()})
    assert chart.datasets["rules"].empty
    assert "never fires" in chart.summary
    assert z_chart({}).summary == "No steps."
    chart = z_chart({"gate/active": points([1], [1]), "gate/threshold": points([1], [0.5])})
    assert chart.points.empty
    assert "warm-up" in chart.summary


def test_a_part_of_the_steps_does_not_say_whether_the_gate_has_fired() -> None:
    before = {name: points([2], [series.y[1]]) for name, series in GATE_SERIES.items() if name != "gate/shutoff_step"}
    before |= {"gate/z": points([2], [0.25])}
    words = "Latest z-score 0.25, maximum z-score 0.25; τ is 2."
    assert z_chart(before).summary == f"{words} The gate has not fired."
    assert steps.z_chart(before, "step", {}, "#4477aa", part=True).summary == words


def test_the_band_is_mean_plus_and_minus_one_spread_where_both_are_known() -> None:
    chart = value_chart(GATE_SERIES)
    band = chart.datasets["band"]
    assert list(band["x"]) == [2.0, 3.0, 4.0, 5.0]
    assert list(band["low"]) == pytest.approx([0.4, 0.5, 0.5, 0.6])
    assert list(band["high"]) == pytest.approx([0.6, 0.6, 0.7, 0.64])


def test_over_another_axis_the_shutoff_lies_where_that_step_lies() -> None:
    # Three passes a step until the gate fires at step 3, one afterwards.
    passes = [3.0, 6.0, 9.0, 10.0, 11.0]
    series = {name: Points(p.steps, [passes[s - 1] for s in p.steps], p.y) for name, p in GATE_SERIES.items()}
    chart = z_chart(series, "backward_passes")
    assert list(chart.datasets["shutoff"]["x"]) == [9.0]
    assert list(chart.datasets["phases"]["x2"]) == [9.0]
    assert list(chart.points["x"]) == [6.0, 9.0]


def test_new_data_of_the_gate_does_not_change_its_specification() -> None:
    # The browser swaps data into the drawn chart and keeps its zoom only while the specification stays.
    short = {name: points(p.steps[:2], p.y[:2]) for name, p in GATE_SERIES.items()}
    for make in (z_chart, value_chart):
        assert json.dumps(make(short).spec) == json.dumps(make(GATE_SERIES).spec)
        assert make(short).alt == make(GATE_SERIES).alt
