"""Candidate rules on scripted gradients, worked by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.toy_learner import ToyLearner, quadratic

sys.path.insert(0, str(Path(__file__).parents[3]))

from studies.candidates import NoiseScale, NoiseScaleRule, OuterNesterov, OuterNesterovRule, SplitProbe, SplitProbeRule


def scripted(*gradients: Sequence[float], lr: float = 0.1) -> ToyLearner:
    """A learner from (0, 0) whose n-th pass has the n-th gradient."""
    given = [torch.tensor(one, dtype=torch.float64) for one in gradients]
    return ToyLearner(torch.zeros(2, dtype=torch.float64), lambda _, number: [given[number]], lr=lr)


def test_parts_are_grouped_by_the_noise_scale_of_the_step_before() -> None:
    rule = NoiseScale(NoiseScaleRule(decay=0.0))
    learner = scripted((3.0, 1.0), (1.0, -1.0), (2.0, 0.0), (4.0, 0.0), (1.0, 3.0), (1.0, -3.0))
    for last in (False, True):
        report = rule.step(learner, last=last)
    # Nothing is known yet, so each part is a step. mean |g|² = (10 + 2)/2 = 6, |mean|² = 4: |G|² = 2·4 − 6 = 2,
    # S = (6 − 4)·2 = 4, B = 2 parts.
    assert learner.flat().tolist() == pytest.approx([-0.4, 0.0])
    assert report.metrics["split/noise_scale_parts"] == pytest.approx(2.0)
    assert rule.parts_per_step == 2
    rule.step(learner, last=False)
    assert learner.flat().tolist() == pytest.approx([-0.4, 0.0]), "waits for the second part"
    rule.step(learner, last=True)
    # One step on the mean (3, 0), shortened to 2/(2 + 2).
    assert learner.flat().tolist() == pytest.approx([-0.55, 0.0])
    # mean |g|² = (4 + 16)/2 = 10, |mean|² = 9: |G|² = 8, S = 2, B = 1/4: a step for each part again.
    assert rule.parts_per_step == 1
    other = NoiseScale(NoiseScaleRule(decay=0.0))
    other.load_state_dict(rule.state_dict())
    for last in (False, True):
        other.step(learner, last=last)
    # Two steps, each of 1/(1 + 1/4). mean |g|² = 10, |mean|² = 1: no signal is left, so all parts are one step.
    assert learner.flat().tolist() == pytest.approx([-0.55 - 0.16, 0.0])
    assert other.parts_per_step == 2


def test_clipping_does_not_hide_the_noise() -> None:
    free, clipped = (NoiseScale(NoiseScaleRule(shrink=False)) for _ in range(2))
    for rule, limit in ((free, float("inf")), (clipped, 0.5)):
        learner = scripted((3.0, 1.0), (1.0, -1.0))
        learner.max_grad_norm = limit
        for last in (False, True):
            rule.step(learner, last=last)
    assert clipped.scale == pytest.approx(free.scale) == pytest.approx(2.0)


def test_half_a_batch_looks_ahead_and_the_other_half_corrects() -> None:
    """θ⁰ = 1 on ½θ² with rate 0.1: two steps on g = 1 lead to 0.8, half of the way is 0.9; there g_B = 0.9."""
    learner = ToyLearner(torch.ones(1, dtype=torch.float64), quadratic(torch.ones(1, dtype=torch.float64)))
    rule = SplitProbe(SplitProbeRule(k=2, alpha=0.5))
    rule.step(learner, last=False)
    assert learner.flat().item() == pytest.approx(0.9)
    rule.step(learner, last=True)
    assert learner.flat().item() == pytest.approx(0.9 - 0.09)
    assert learner.passes == 2
    # A batch that is not split is a plain step.
    rule.step(learner, last=True)
    assert learner.flat().item() == pytest.approx(0.81 * 0.9)


def test_outer_momentum_carries_a_window_into_the_next() -> None:
    """Each step is −0.1 in the first coordinate; windows of two, μ = 0.5."""
    learner = scripted(*[(1.0, 0.0)] * 4)
    rule = OuterNesterov(OuterNesterovRule(window=2, momentum=0.5))
    ends = []
    for _ in range(4):
        rule.step(learner)
        ends.append(learner.flat()[0].item())
    # Δ = −0.2, v = −0.2: −0.2 − 0.1. Then Δ = −0.2, v = −0.1 − 0.2: −0.5 − 0.15.
    assert ends == pytest.approx([-0.1, -0.3, -0.4, -0.65])
