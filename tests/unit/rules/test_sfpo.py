"""SFPO on toy problems in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_learner import ToyLearner, finite_except, quadratic, random_problem, relative_error

from gxpo_trainer.config import SfpoRule
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.sfpo import SFPO


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.sampled_from(["sgd", "adamw"]), st.integers(0, 2**31))
def test_alpha_one_is_k_plus_1_plain_steps(k, optimizer, seed):
    start, gradient = random_problem(seed)
    kind = {"optimizer": optimizer, "lr": 0.05, "weight_decay": 0.01, "momentum": 0.9}
    toy, twin = ToyLearner(start, gradient, **kind), ToyLearner(start, gradient, **kind)
    report = SFPO(SfpoRule(k=k, alpha=1.0, gate={"mode": "never"})).step(toy)
    for _ in range(k + 1):
        GRPO().step(twin)
    assert report.backward_passes == k + 1
    assert relative_error(toy.flat(), twin.flat(), start) < 1e-9


def test_a_worked_example_by_hand():
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


# The plain step that every rule falls back to.


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
