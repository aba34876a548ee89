"""Which coordinates are extrapolated: |g⁰| > δ, or a share of the root mean square."""

from __future__ import annotations

import pytest
import torch
from support.toy_learner import ToyLearner, quadratic

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.rules.gxpo import GXPO

H = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)
START = torch.tensor([2.0, 0.02, 0.002], dtype=torch.float64)
"""g⁰ = (1, 0.01, 0.001): root mean square 0.5774, 1e-2 of which lies between the second and the third."""


def step(**rule):
    toy = ToyLearner(START, quadratic(H), lr=0.5)
    report = GXPO(GxpoRule(k=4, alpha=1.0, gate={"mode": "never"}, activity_rms=1e-2, **rule)).step(toy)
    return toy, report.metrics


@pytest.mark.parametrize("predictor", ["gradient", "displacement"])
def test_a_share_of_the_root_mean_square_decides(predictor):
    toy, metrics = step(activity="rms", predictor=predictor)
    assert metrics["gxpo/inactive_fraction"] == pytest.approx(1 / 3)
    # r = 1 − ηh = 0.75. Active: θᴷ = θ⁰ r⁴ and one corrective step more. Inactive: θ² and the corrective step.
    expected = START * torch.tensor([0.75**5, 0.75**5, 0.75**3], dtype=torch.float64)
    assert torch.allclose(toy.flat(), expected, rtol=1e-12)


def test_replay_uses_it_too():
    toy, metrics = step(activity="rms", predictor="replay")
    assert metrics["gxpo/inactive_fraction"] == pytest.approx(1 / 3)
    # Inactive in `replay` means a constant virtual gradient: θ² − 2η g¹, then the corrective step.
    third = 0.002 * (0.75**2 - 2 * 0.25 * 0.75) * 0.75
    assert toy.flat().tolist() == pytest.approx([2 * 0.75**5, 0.02 * 0.75**5, third], rel=1e-12)


def test_delta_is_the_default():
    toy, metrics = step()
    assert metrics["gxpo/inactive_fraction"] == 0.0
    assert torch.allclose(toy.flat(), START * 0.75**5, rtol=1e-12)
