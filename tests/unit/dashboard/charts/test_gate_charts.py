"""The gate's pictures hold the right numbers: z, τ, window, phases and shut-off."""

from __future__ import annotations

import json
import math

import pytest

from gxpo_dashboard.charts import gate
from gxpo_dashboard.view_models.rules import rules_of
from gxpo_dashboard.view_models.series import Points
from gxpo_trainer.config import RunConfig

RULES = rules_of(RunConfig.model_json_schema())


def points(steps: list[int], y: list[float], x: list[float] | None = None) -> Points:
    return Points(list(steps), list(x or [float(step) for step in steps]), list(y))


STEPS = [1, 2, 3, 4, 5]
SERIES = {
    # Fired at step 3: the state after steps 1 and 2 is on, after 3 and later off.
    "gate/active": points(STEPS, [1, 1, 0, 0, 0]),
    "gate/z": points([2, 3], [0.25, 2.5]),
    "gate/threshold": points(STEPS, [2.0] * 5),
    "gate/value": points(STEPS, [0.5, 0.6, 0.9, 0.7, 0.6]),
    "gate/mean": points(STEPS, [math.nan, 0.5, 0.55, 0.6, 0.62]),
    "gate/std": points(STEPS, [math.nan, 0.1, 0.05, 0.1, 0.02]),
    "gate/shutoff_step": points([3, 4, 5], [3.0, 3.0, 3.0]),
}


def test_phases_change_at_the_step_that_fired() -> None:
    intervals = gate.phases(SERIES)
    assert intervals.to_dict("records") == [{"x": 1.0, "x2": 3.0, "phase": gate.LOOK_AHEAD}]


def test_a_rearmed_gate_gives_a_phase_for_each_stretch() -> None:
    intervals = gate.phases({"gate/active": points(STEPS, [1, 0, 0, 1, 1])})
    assert intervals[["x", "x2"]].to_numpy().tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_the_z_chart_marks_threshold_and_shutoff() -> None:
    chart = gate.z_chart(SERIES)
    assert chart.points[["x", "y"]].to_numpy().tolist() == [[2.0, 0.25], [3.0, 2.5]]
    assert chart.datasets["rules"].to_dict("records") == [{"y": 2.0, "label": "τ = 2"}]
    assert chart.datasets["shutoff"].to_dict("records") == [{"x": 3.0, "label": "shut off at step 3"}]
    assert chart.summary == "The gate fired at step 3; τ is 2. The maximum z-score was 2.5."


def test_a_two_sided_gate_has_both_limits() -> None:
    chart = gate.z_chart(SERIES, two_sided=True)
    assert list(chart.datasets["rules"]["y"]) == [2.0, -2.0]
    assert list(chart.datasets["rules"]["label"]) == ["τ = 2", "−τ = −2"]


def test_the_summary_names_an_infinite_threshold_the_warm_up_and_a_run_without_steps() -> None:
    chart = gate.z_chart({**SERIES, "gate/threshold": points([1], [math.inf]), "gate/shutoff_step": Points()})
    assert chart.datasets["rules"].empty
    assert "never fires" in chart.summary
    assert gate.z_chart({}).summary == "No steps yet."
    chart = gate.z_chart({"gate/active": points([1], [1]), "gate/threshold": points([1], [0.5])})
    assert chart.points.empty
    assert "warm-up" in chart.summary


def test_the_band_is_mean_plus_and_minus_one_spread_where_both_are_known() -> None:
    chart = gate.value_chart(SERIES)
    band = chart.datasets["band"]
    assert list(band["x"]) == [2.0, 3.0, 4.0, 5.0]
    assert list(band["low"]) == pytest.approx([0.4, 0.5, 0.5, 0.6])
    assert list(band["high"]) == pytest.approx([0.6, 0.6, 0.7, 0.64])


def test_the_monitored_value_has_the_name_that_its_rule_declares() -> None:
    for rule, watched in (("sfpo", "policy entropy"), ("gxpo", "corrective norm ‖g_slow‖"), ("new", "monitored value")):
        declared = RULES.of({"name": rule, "gate": {"threshold": 1.0}}).watched
        assert declared == watched
        assert gate.value_chart(SERIES, watched=declared).alt.startswith(watched)


def test_over_another_axis_the_shutoff_lies_where_that_step_lies() -> None:
    # Three passes a step until the gate fires at step 3, one afterwards.
    passes = [3.0, 6.0, 9.0, 10.0, 11.0]
    series = {name: points(p.steps, p.y, [passes[s - 1] for s in p.steps]) for name, p in SERIES.items()}
    chart = gate.z_chart(series, "backward_passes")
    assert list(chart.datasets["shutoff"]["x"]) == [9.0]
    assert list(chart.datasets["phases"]["x2"]) == [9.0]
    assert list(chart.points["x"]) == [6.0, 9.0]


def test_new_data_does_not_change_the_specification() -> None:
    # The browser swaps data into the drawn chart and keeps its zoom only while the specification stays.
    short = {name: points(p.steps[:2], p.y[:2]) for name, p in SERIES.items()}
    for make in (gate.z_chart, gate.value_chart):
        assert json.dumps(make(short).spec) == json.dumps(make(SERIES).spec)
        assert make(short).alt == make(SERIES).alt


def test_no_two_entries_of_a_legend_have_one_colour() -> None:
    """The phase has the hue of the rule, so that its lines have none."""
    rule = RULES.of({"name": "gxpo"})
    for chart in (gate.z_chart(SERIES, color=rule.color), gate.value_chart(SERIES, color=rule.color)):
        scales = [
            layer["encoding"][channel]["scale"]
            for layer in chart.spec["layer"]
            for channel in ("fill", "color")
            if channel in layer["encoding"]
        ]
        colors = {name: color for s in scales for name, color in zip(s["domain"], s["range"], strict=True)}
        assert len(set(colors.values())) == len(colors)
        assert colors[gate.LOOK_AHEAD] == rule.color
