"""The expected step of a false alarm, against closed forms and a simulation of the gate's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from docs_build.settings import INTRODUCTION
from gxpo_trainer.config import GateConfig, SfpoGateConfig
from gxpo_trainer.rules.gate import alarm_probability, describe, expected_false_alarm_step


def simulated_first_alarms(gate: GateConfig, runs: int, seed: int = 0) -> np.ndarray:
    """First firing step of `runs` sequences of standard normals under the gate's definition, shape [runs]."""
    rng = np.random.default_rng(seed)
    past = rng.normal(size=(runs, gate.warmup))[:, -gate.window :]
    first = np.zeros(runs)
    alive = np.arange(runs)
    step = gate.warmup
    while len(alive):
        step += 1
        value = rng.normal(size=len(alive))
        z = (value - past.mean(axis=1)) / past.std(axis=1)
        fired = (np.abs(z) if gate.two_sided else z) >= gate.threshold
        first[alive[fired]] = step
        alive = alive[~fired]
        past = np.concatenate([past, value[:, None]], axis=1)[~fired][:, -gate.window :]
    return first


def test_a_long_window_gives_the_normal_tail() -> None:
    # The paper's τ = 0.5: a standard normal exceeds it with probability 0.3085.
    assert alarm_probability(0.5, 5000) == pytest.approx(0.3085, abs=2e-4)
    assert alarm_probability(0.5, 5000, two_sided=True) == pytest.approx(0.6171, abs=4e-4)


def test_two_past_values_follow_a_scaled_cauchy() -> None:
    # N = 2: z = t₁·√3, so P(z ≥ √3) = P(t₁ ≥ 1) = 1/4.
    assert alarm_probability(math.sqrt(3), 2) == pytest.approx(0.25, abs=1e-14)


@pytest.mark.parametrize("num_past", [2, 7, 30])
def test_the_chance_of_one_alarm_matches_simulation(num_past: int) -> None:
    rng = np.random.default_rng(1)
    past, value = rng.normal(size=(200_000, num_past)), rng.normal(size=200_000)
    z = (value - past.mean(axis=1)) / past.std(axis=1)
    # Three standard errors of a share of 200,000 are at most 0.0034.
    assert alarm_probability(1.0, num_past) == pytest.approx((z >= 1.0).mean(), abs=0.0034)
    assert alarm_probability(1.0, num_past, two_sided=True) == pytest.approx((np.abs(z) >= 1.0).mean(), abs=0.0034)


@pytest.mark.parametrize(
    ("gate", "tolerance"),
    [
        (GateConfig(), 0.03),
        (GateConfig(warmup=90), 0.03),
        (GateConfig(threshold=1.0, two_sided=True, warmup=10), 0.03),
        (GateConfig(threshold=2.0, warmup=10), 0.11),
        (GateConfig(threshold=2.0, warmup=5, window=5), 0.18),
        (GateConfig(threshold=2.0, warmup=30, two_sided=True), 0.08),
    ],
)
def test_the_expected_step_matches_simulation(gate: GateConfig, tolerance: float) -> None:
    simulated = simulated_first_alarms(gate, runs=4000).mean()
    assert expected_false_alarm_step(gate) == pytest.approx(simulated, rel=tolerance)


def test_the_paper_presets_gate_shuts_off_on_noise_where_the_paper_saw_it() -> None:
    # 92 to 123 in table 5; three runs at 100.
    assert 92 < expected_false_alarm_step(GateConfig(threshold=0.5, window=30, warmup=90)) < 95


def test_a_gate_that_cannot_fire_has_no_expected_step() -> None:
    for gate in (GateConfig(threshold=math.inf), GateConfig(mode="never"), SfpoGateConfig(threshold=math.inf)):
        assert expected_false_alarm_step(gate) == math.inf
        assert describe(gate) == "The gate never fires: the look-ahead stays on to the end."


def test_a_two_sided_gate_at_zero_fires_as_soon_as_the_warm_up_is_over() -> None:
    gate = GateConfig(threshold=0.0, two_sided=True, warmup=7)
    assert expected_false_alarm_step(gate) == 8


def test_the_sentence_for_people_states_two_digits() -> None:
    assert "at step 93;" in describe(GateConfig(warmup=90))
    assert "at step 280;" in describe(GateConfig(threshold=3.0, warmup=10))
    assert "at step 640,000;" in describe(GateConfig(threshold=6.0))
    assert "at step 9e+06;" in describe(GateConfig(threshold=7.0))


def test_the_documented_figure_for_the_defaults_is_right() -> None:
    assert round(expected_false_alarm_step(GateConfig())) == 5
    assert "that is the 5th step" in INTRODUCTION


def test_fewer_than_two_past_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 past values"):
        alarm_probability(1.0, 1)
