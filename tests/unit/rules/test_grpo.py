"""The plain step that every rule falls back to."""

from __future__ import annotations

import math

import pytest
import torch
from support.toy_learner import ToyLearner

from gxpo_trainer.rules.grpo import GRPO


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


def test_an_optimizer_without_a_recurrence_has_no_update_norm() -> None:
    toy = learner([3.0, 4.0], lr=0.1)
    toy.recurrence = lambda: None
    assert "update/norm" not in GRPO().step(toy).metrics


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    toy = learner([math.nan, 1.0])
    report = GRPO().step(toy)
    assert toy.flat().tolist() == [1.0, -2.0]
    assert (report.finite, report.fallback) == (False, "the gradient is not finite")
