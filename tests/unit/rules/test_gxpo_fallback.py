"""What GXPO does when a gradient is not finite: θ¹, the plain GRPO step, or no step at all."""

from __future__ import annotations

import math

import pytest
import torch
from support.toy_learner import ToyLearner, gxpo, quadratic, relative_error

from gxpo_trainer.rules.grpo import GRPO

pytestmark = pytest.mark.usefixtures("float64")
HALVING = {"betas": (0.5, 0.5), "optimizer": "adamw", "lr": 0.1}


def plain_step(start, gradient, **learner):
    toy = ToyLearner(start, gradient, **learner)
    GRPO().step(toy)
    return toy


def inject(toy, at):
    """Make the gradient of pass `at` (from 0) NaN."""
    inner = toy._gradient
    toy._gradient = lambda theta, taken: (
        [g * math.nan for g in inner(theta, taken)] if taken == at else inner(theta, taken)
    )


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(("optimizer", "state"), [("sgd", "keep"), ("adamw", "rollback")])
def test_a_gradient_that_is_not_finite_falls_back_to_the_first_probe(predictor, at, optimizer, state):
    gradient = quadratic(torch.tensor([0.2, 0.9]))
    start = torch.tensor([1.0, -2.0])
    toy = ToyLearner(start, gradient, optimizer=optimizer, lr=0.1)
    inject(toy, at)
    rule = gxpo(k=5, predictor=predictor, probe_state=state)
    report = rule.step(toy)
    theta1 = plain_step(start, gradient, optimizer=optimizer, lr=0.1).flat()
    assert relative_error(toy.flat(), theta1, start) < 1e-9
    assert report.fallback is not None
    assert report.finite
    assert report.backward_passes == at + 1
    assert "gate/value" not in report.metrics
    assert rule.gate.state.window == []


def test_a_first_gradient_that_is_not_finite_skips_the_step():
    toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])))
    inject(toy, 0)
    report = gxpo(k=5).step(toy)
    assert not report.finite
    assert report.backward_passes == 1
    assert toy.flat().item() == 1.0


def constant_then_nan(values, at):
    """Gradient number n is values[n], that of pass `at` NaN."""
    return lambda theta, taken: [torch.full_like(theta[0], math.nan if taken == at else values[taken])]


def test_a_corrective_gradient_that_is_not_finite_steps_from_theta0_with_the_moments_after_both_probes():
    # g⁰ = 1, g¹ = 0.5, β = 0.5: m = 0.5·(0.5·1) + 0.5·0.5 = 0.5, v = 0.5·(0.5·1) + 0.5·0.25 = 0.375; both divided by
    # 1 − 0.5² = 0.75: m̂ = 2/3, v̂ = 1/2. θ = 1 − 0.1·(2/3)/√(1/2) − 0.1·0.5·1 = 0.8557191.
    toy = ToyLearner(torch.tensor([1.0]), constant_then_nan([1.0, 0.5], at=2), weight_decay=0.5, **HALVING)
    report = gxpo(k=5).step(toy)
    assert toy.flat().item() == pytest.approx(0.8557191, abs=1e-7)
    assert toy.optimizer_state().step == 2
    assert report.fallback == "the gradient of pass 3 is not finite"
    assert report.metrics["update/norm"] == pytest.approx(1 - 0.8557191, abs=1e-7)
    assert "grad/norm_slow" not in report.metrics
    assert report.metrics["grad/norm_g1"] == 0.5


def test_the_point_after_a_fallback_is_published():
    for rule in ({}, {"predictor": "displacement"}, {"probe_state": "rollback"}):
        toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([0.5])), **HALVING)
        inject(toy, 2)
        gxpo(k=5, **rule).step(toy)
        assert toy.published == 2, "θ̃ for the corrective pass, then the point returned to"


def test_a_rolled_back_fallback_leaves_the_state_of_one_step():
    toy = ToyLearner(torch.tensor([1.0]), constant_then_nan([1.0, 0.5], at=2), **HALVING)
    gxpo(k=5, probe_state="rollback").step(toy)
    assert toy.optimizer_state().step == 1
    assert toy.optimizer_state().moments()["exp_avg"][0].item() == 0.5  # (1 − β1)·g⁰
    assert toy.flat().item() == pytest.approx(0.9, abs=1e-7)  # Adam's first step is η long


@pytest.mark.parametrize(
    ("learner", "state", "expected"),
    [
        (HALVING, "keep", 0.9),  # the moments after one step are those of θ¹
        ({"lr": 0.1, "momentum": 0.9}, "keep", 0.9),
        ({"lr": 0.1}, "keep", 1.0),  # plain descent keeps no gradient, and one probe keeps none either
        (HALVING, "rollback", 1.0),  # the moments are rolled back with nothing to take the step from
    ],
)
def test_one_probe_returns_to_theta1_where_the_moments_still_tell_it(learner, state, expected):
    toy = ToyLearner(torch.tensor([1.0]), constant_then_nan([1.0], at=1), **learner)
    report = gxpo(k=5, predictor="replay", probes=1, probe_state=state).step(toy)
    assert toy.flat().item() == pytest.approx(expected, abs=1e-7)
    assert report.fallback == "the gradient of pass 2 is not finite"
    assert report.backward_passes == 2
    assert toy.optimizer_state().step == (0 if state == "rollback" else 1)
    assert "grad/norm_g1" not in report.metrics
