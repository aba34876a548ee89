"""The z-score gate on hand-worked windows."""

from __future__ import annotations

import math

import pytest

from gxpo_trainer.config import GateConfig
from gxpo_trainer.rules.gate import Gate


def run(gate, values):
    return [gate.observe(value, step) for step, value in enumerate(values, start=1)]


def test_z_uses_the_population_std_of_the_window_before_the_value_enters():
    # window (1, 3): mean 2, population std 1; value 4: z = 2.
    readings = run(Gate(GateConfig(threshold=9.0, window=30, warmup=2, epsilon=0.0)), [1.0, 3.0, 4.0])
    assert readings[0].z is None
    assert readings[1].z is None
    assert (readings[2].mean, readings[2].std, readings[2].z) == (2.0, 1.0, 2.0)


def test_no_z_before_the_warm_up_is_over():
    gate = Gate(GateConfig(threshold=0.5, window=5, warmup=4))
    readings = run(gate, [1.0, 2.0, 100.0, 1.0, 1.5])
    assert [r.z is None for r in readings] == [True, True, True, True, False]
    assert "gate/z" not in gate.metrics(readings[3])


def test_a_warm_up_longer_than_the_window_counts_values_seen():
    gate = Gate(GateConfig(threshold=0.5, window=3, warmup=6))
    readings = run(gate, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 9.0])
    assert [r.z is None for r in readings] == [True] * 6 + [False]
    assert gate.state.shutoff_step == 7


def test_the_window_rolls_and_the_value_that_fires_enters_it_too():
    gate = Gate(GateConfig(threshold=5.0, window=3, warmup=2))
    run(gate, [1.0, 2.0, 1.0, 2.0, 50.0])
    assert gate.state.window == [1.0, 2.0, 50.0]
    assert gate.state.shutoff_step == 5
    assert not gate.active


def test_the_gate_is_one_sided_by_default():
    gate = Gate(GateConfig(threshold=1.0, window=5, warmup=2))
    run(gate, [1.0, 1.1, -50.0])
    assert gate.active


def test_an_infinite_threshold_never_fires_even_on_an_infinite_z():
    gate = Gate(GateConfig(threshold=math.inf, window=5, warmup=2, epsilon=0.0))
    readings = run(gate, [1.0, 1.0, 2.0])
    assert readings[2].z == math.inf
    assert gate.active


@pytest.mark.parametrize(("value", "z"), [(1.0, 0.0), (2.0, math.inf), (0.5, -math.inf)])
def test_against_a_constant_window_z_is_zero_or_infinite(value, z):
    gate = Gate(GateConfig(threshold=math.inf, window=5, warmup=2, epsilon=0.0))
    assert run(gate, [1.0, 1.0, value])[2].z == z


def test_mode_never_measures_and_does_not_fire():
    gate = Gate(GateConfig(threshold=0.5, mode="never", window=5, warmup=2))
    readings = run(gate, [1.0, 1.1, 50.0])
    assert readings[2].z > 0.5
    assert gate.active


def test_a_value_that_is_not_finite_is_neither_judged_nor_kept():
    gate = Gate(GateConfig(threshold=0.5, window=5, warmup=2))
    run(gate, [1.0, 1.1, math.nan, math.inf])
    assert gate.active
    assert gate.state.window == [1.0, 1.1]


def test_rearm_returns_after_the_cool_down_once_z_is_back_under_the_lower_threshold():
    gate = Gate(GateConfig(threshold=2.0, window=4, warmup=2, mode="rearm", rearm_after=3, rearm_threshold=0.0))
    run(gate, [1.0, 1.2, 9.0])
    assert not gate.active
    # The frozen window is (1.0, 1.2, 9.0) with mean 3.73: 0.5 is under it, but two steps of cool-down remain.
    for value, active in [(0.5, False), (0.5, False), (5.0, False), (0.5, True)]:
        gate.observe_inactive(value)
        assert gate.active is active


def test_a_two_sided_gate_returns_once_the_distance_from_the_mean_is_small():
    settings = {"threshold": 2.0, "two_sided": True, "mode": "rearm", "rearm_after": 1, "rearm_threshold": 1.0}
    gate = Gate(GateConfig(window=3, warmup=2, epsilon=0.0, **settings))
    run(gate, [6.0, 8.0, 1.0])
    assert gate.state.shutoff_step == 3  # mean 7, std 1: z = −6
    # The frozen window (6, 8, 1) has mean 5 and std √(26/3) = 2.94; z is −2.04 at −1, 1.70 at 10 and 0.68 at 7.
    for value, active in [(-1.0, False), (10.0, False), (7.0, True)]:
        gate.observe_inactive(value)
        assert gate.active is active


def test_a_permanent_gate_stays_shut():
    gate = Gate(GateConfig(threshold=2.0, window=4, warmup=2))
    run(gate, [1.0, 1.2, 9.0])
    assert gate.observe_inactive(0.0) is None
    assert not gate.active


def test_state_survives_json():
    import json

    gate = Gate(GateConfig(threshold=2.0, window=4, warmup=2))
    run(gate, [1.0, 1.2, 1.1])
    other = Gate(gate.settings)
    other.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert other.read(3.0) == gate.read(3.0)


def test_contradictory_settings_are_refused_by_name():
    with pytest.raises(ValueError, match="rearm_threshold must be below threshold"):
        GateConfig(mode="rearm", threshold=0.5, rearm_threshold=0.5)
    with pytest.raises(ValueError, match=r"rearm_threshold = 0 with two_sided = true: \|z\| is never below it"):
        GateConfig(mode="rearm", threshold=1.0, two_sided=True)
    with pytest.raises(ValueError, match="threshold is NaN"):
        GateConfig(threshold=math.nan)
