"""The control rules, several epochs on a batch and extragradient, against plain steps and calculations by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_learner import ToyLearner, finite_except, quadratic, random_problem, relative_error

from gxpo_trainer.config import EpochsRule, ExtragradientRule
from gxpo_trainer.rules.controls import Epochs, Extragradient
from gxpo_trainer.rules.grpo import GRPO

KINDS = [
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"optimizer": "adamw", "lr": 0.05, "weight_decay": 0.01},
]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.sampled_from(KINDS), st.integers(0, 2**31))
def test_epochs_are_k_plain_steps_optimizer_state_included(k, kind, seed):
    start, gradient = random_problem(seed)
    toy, twin = ToyLearner(start, gradient, **kind), ToyLearner(start, gradient, **kind)
    for _ in range(2):
        report = Epochs(EpochsRule(k=k)).step(toy)
        for _ in range(k):
            GRPO().step(twin)
    assert report.backward_passes == k
    assert torch.equal(toy.flat(), twin.flat())
    assert toy.optimizer_state().step == twin.optimizer_state().step == 2 * k


def test_epochs_by_hand():
    # L = θ²/2, η = 0.5, K = 3, θ⁰ = 1: 0.5, 0.25, 0.125.
    toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])), lr=0.5)
    report = Epochs().step(toy)
    assert toy.flat().item() == 0.125
    metrics = report.metrics
    assert (metrics["grad/norm_g0"], metrics["grad/norm_g1"], metrics["update/norm"]) == (1.0, 0.5, 0.875)
    assert {"policy/pass1/loss", "policy/pass3/loss", "policy/loss"} <= metrics.keys()


@pytest.mark.parametrize(("at", "left"), [(0, 1.0), (1, 0.5), (2, 0.25)])
def test_epochs_stop_at_a_gradient_that_is_not_finite(at, left):
    toy = ToyLearner(torch.tensor([1.0]), finite_except(at), lr=0.5)
    report = Epochs(EpochsRule(k=4)).step(toy)
    assert toy.flat().item() == left
    assert report.backward_passes == at + 1
    assert report.finite == (at > 0)
    assert ("grad/norm_g1" in report.metrics) is (at == 2)
    assert "not finite" in report.fallback


def test_extragradient_by_hand():
    # L = θ²/2, η = 0.5, θ⁰ = 1. α = 1: θ̃ = 0.5, θ = 1 − 0.5 · 0.5 = 0.75. α = ½: θ̃ = 0.75, θ = 1 − 0.5 · 0.75 = 0.625.
    for alpha, end in ((1.0, 0.75), (0.5, 0.625)):
        toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])), lr=0.5)
        report = Extragradient(ExtragradientRule(alpha=alpha)).step(toy)
        assert toy.flat().item() == end
        assert report.backward_passes == 2
        assert report.metrics["update/norm"] == 1 - end
        assert (report.metrics["grad/norm_g0"], report.metrics["grad/norm_slow"]) == (1.0, 1 - 0.5 * alpha)
        assert report.metrics["grad/cos_g0_slow"] == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.floats(0.1, 1.0), st.integers(0, 2**31))
def test_the_optimizer_sees_one_step_on_the_probes_gradient(kind, alpha, seed):
    start, gradient = random_problem(seed)
    toy, twin = ToyLearner(start, gradient, **kind), ToyLearner(start, gradient, **kind)
    rule = Extragradient(ExtragradientRule(alpha=alpha))
    for step in range(1, 4):
        rule.step(toy)
        # The reference: the probe by another optimizer of the same state, its gradient into one torch step from θ⁰.
        probe = ToyLearner(twin.flat(), gradient, **kind)
        probe.optimizer_state().set_step(step - 1)
        for name, (held,) in twin.optimizer_state().moments().items():
            probe.optimizer_state().moments()[name][0].copy_(held)
        probe.backward()
        probe.optimizer_step()
        theta0 = twin.flat().clone()
        twin.theta[0].grad = gradient([theta0 + alpha * (probe.flat() - theta0)], 0)[0]
        twin.optimizer_step()
        assert relative_error(toy.flat(), twin.flat(), theta0) < 1e-9
        assert toy.optimizer_state().step == step


@pytest.mark.parametrize(("at", "alpha", "left"), [(0, 1.0, 1.0), (1, 1.0, 0.5), (1, 0.5, 0.5)])
def test_extragradient_leaves_the_plain_step_or_skips_it_where_a_gradient_is_not_finite(at, alpha, left):
    toy = ToyLearner(torch.tensor([1.0]), finite_except(at), lr=0.5)
    report = Extragradient(ExtragradientRule(alpha=alpha)).step(toy)
    assert toy.flat().item() == left
    assert (report.backward_passes, report.finite) == (at + 1, at > 0)
    assert report.fallback == ("the gradient of pass 2 is not finite" if at else "the gradient is not finite")
    assert "grad/norm_slow" not in report.metrics


@pytest.mark.parametrize("rule", [GRPO(), Epochs(), Extragradient()])
def test_they_have_no_state(rule):
    rule.load_state_dict(rule.state_dict())
    with pytest.raises(ValueError, match=r"has no state, but was given \['gate'\]"):
        rule.load_state_dict({"gate": {}})
