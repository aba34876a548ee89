"""SFPO and the controls, several epochs on a batch and extragradient, against plain steps and calculations by hand; and
the plain step that every rule falls back to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.toy_learner import ToyLearner, finite_except, quadratic, random_problem, relative_error

from gxpo_trainer.config import EpochsRule, ExtragradientRule, SfpoRule
from gxpo_trainer.rules.controls import Epochs, Extragradient
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.sfpo import SFPO

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


def test_sfpo_returns_to_the_mean_of_its_fast_steps_where_a_gradient_is_not_finite():
    # η = 0.5, θ⁰ = 1, θ² = 0.25: the mean of two steps of −0.75 in all is 1 − 0.375.
    toy = ToyLearner(torch.tensor([1.0]), finite_except(2), lr=0.5)
    report = SFPO(SfpoRule(k=3)).step(toy)
    assert (toy.flat().item(), report.backward_passes, report.finite) == (0.625, 3, True)


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


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.sampled_from(KINDS), st.integers(0, 2**31))
def test_sfpo_with_alpha_one_is_k_plus_1_plain_steps(k, kind, seed):
    start, gradient = random_problem(seed)
    toy, twin = ToyLearner(start, gradient, **kind), ToyLearner(start, gradient, **kind)
    report = SFPO(SfpoRule(k=k, alpha=1.0, gate={"mode": "never"})).step(toy)
    for _ in range(k + 1):
        GRPO().step(twin)
    assert report.backward_passes == k + 1
    assert relative_error(toy.flat(), twin.flat(), start) < 1e-9


def test_sfpo_by_hand():
    # L = θ²/2, η = 0.5, K = 2, α = 0.8, θ⁰ = 1: θ² = 0.25, θ̃ = 1 − 0.8·0.75 = 0.4, θ = 0.2.
    toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])), lr=0.5)
    report = SFPO(SfpoRule(k=2, alpha=0.8, gate={"mode": "never"})).step(toy)
    assert toy.flat().item() == pytest.approx(0.2)
    # The gradient is θ itself: 1 at θ⁰, 0.5 at θ¹, 0.4 at θ̃.
    norms = [report.metrics[f"grad/norm_{name}"] for name in ("g0", "g1", "slow")]
    assert norms == pytest.approx([1.0, 0.5, 0.4])
    assert report.metrics["update/norm"] == pytest.approx(0.8)


@pytest.mark.parametrize(("two_sided", "fires"), [(True, True), (False, False)])
def test_a_falling_entropy_fires_only_the_two_sided_gate_and_ends_in_a_plain_step(two_sided, fires):
    # K = 2: first passes are 0, 3, 6, 9. Entropies 1.0, 1.1, 1.0 then 0.1: z ≪ −1.
    values = [1.0, 0, 0, 1.1, 0, 0, 1.0, 0, 0, 0.1, 0, 0]
    gate = {"threshold": 2.5, "window": 3, "warmup": 3, "two_sided": two_sided}
    toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])), lr=0.01, entropy=values.__getitem__)
    rule = SFPO(SfpoRule(k=2, gate=gate))
    reports = [rule.step(toy) for _ in range(4)]
    assert [r.backward_passes for r in reports] == [3, 3, 3, 1 if fires else 3]
    assert reports[3].metrics["gate/active"] == (0.0 if fires else 1.0)
    # By hand: window (1.0, 1.1, 1.0), mean 1.0333…, population std 0.04714, z = (0.1 − 1.0333)/0.04714 = −19.8.
    assert reports[3].metrics["gate/z"] == pytest.approx(-19.799, rel=1e-4)


@pytest.mark.parametrize("at", [1, 2])
def test_a_later_gradient_that_is_not_finite_leaves_a_finite_point(at):
    toy = ToyLearner(torch.tensor([1.0]), finite_except(at), lr=0.5)
    report = SFPO(SfpoRule(k=2, alpha=0.8, gate={"mode": "never"})).step(toy)
    # at 1: θ¹ = 0.5. at 2 (slow pass): θ⁰ + (θ² − θ⁰)/2 = 1 − 0.375 = 0.625.
    assert toy.flat().item() == pytest.approx(0.5 if at == 1 else 0.625)
    assert report.fallback == f"the gradient of pass {at + 1} is not finite"
    assert report.backward_passes == at + 1
    assert toy.published == at  # the point returned to; before the slow pass also θ̃
    assert ("grad/norm_g1" in report.metrics) is (at == 2), "a norm that is not finite is no value"
    assert "grad/norm_slow" not in report.metrics


# The plain step.


def learner(gradient: list[float], **settings) -> ToyLearner:
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    return ToyLearner(start, lambda theta, _: [torch.tensor(gradient, dtype=torch.float64)], **settings)


def test_a_step_by_hand() -> None:
    toy = learner([3.0, 4.0], lr=0.1)
    report = GRPO().step(toy)
    assert toy.flat().tolist() == pytest.approx([0.7, -2.4])
    assert (report.backward_passes, report.finite, report.fallback) == (1, True, None)
    assert report.metrics["grad/norm_g0"] == 5.0
    assert report.metrics["update/norm"] == pytest.approx(0.5)
    assert report.metrics["policy/pass1/loss"] == report.metrics["policy/loss"] == 0.0


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9}, {"optimizer": "adamw"}, {"optimizer": "adamw", "weight_decay": 0.5}]
)
def test_the_update_norm_is_the_length_of_the_step(settings) -> None:
    toy = learner([3.0, 4.0], lr=1e-6, **settings)
    for _ in range(3):
        before = toy.flat().clone()
        norm = GRPO().step(toy).metrics["update/norm"]
        # A weight decay acts on the parameters after the step instead of before it: ηλ apart.
        assert norm == pytest.approx((toy.flat() - before).norm().item(), rel=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    toy = learner([math.nan, 1.0])
    report = GRPO().step(toy)
    assert toy.flat().tolist() == [1.0, -2.0]
    assert (report.finite, report.fallback) == (False, "the gradient is not finite")
