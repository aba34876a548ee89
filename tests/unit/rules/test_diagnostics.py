"""Trajectory diagnostics: what a rule used against K real steps, for every rule that looks ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.toy_learner import RankLearner, ToyLearner, quadratic

from gxpo_trainer.config import GrpoRule, GxpoRule, RunConfig, SfpoRule
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.rules.contract import Trajectory, cosine, make_rule, rms
from gxpo_trainer.rules.diagnostics import prediction_error, ratio_noise, take_trajectory

NEVER = {"mode": "never"}
CURVATURE = torch.tensor([0.9, 0.5, 0.2, 0.1, 0.05])
START = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7])


def learner_with_points() -> tuple[ToyLearner, list[torch.Tensor]]:
    """fp32, and steps so small that rounding shows; the points are those of the backward passes."""
    points: list[torch.Tensor] = []

    def gradient(theta: list[torch.Tensor], _: int) -> list[torch.Tensor]:
        points.append(theta[0].clone())
        return [CURVATURE * theta[0]]

    return ToyLearner(START, gradient, lr=1e-6), points


@pytest.mark.parametrize("settings", [GxpoRule(k=4, alpha=0.3, gate=NEVER), SfpoRule(k=4, alpha=0.3, gate=NEVER)])
def test_the_error_of_theta_tilde_is_measured_on_the_point_that_was_used(settings: Any) -> None:
    learner, points = learner_with_points()
    rule: Any = make_rule(settings)
    rule.trajectory = truth = take_trajectory(learner, settings.k)
    assert truth is not None
    metrics = rule.step(learner).metrics
    used = points[-1].double()
    start = START.double()
    target = start + settings.alpha * (truth.theta_k[0].double() - start)
    expected = (used - target).abs().median().item()
    assert expected > 0
    assert metrics["gxpo/theta_tilde_error"] == pytest.approx(expected, rel=1e-6)
    assert rule.trajectory is None


def test_the_k_real_steps_of_sfpo_are_their_own_trajectory() -> None:
    learner = ToyLearner(START, quadratic(CURVATURE), lr=0.1)
    rule: Any = make_rule(SfpoRule(k=3, gate=NEVER))
    rule.trajectory = take_trajectory(learner, 3)
    metrics = rule.step(learner).metrics
    assert metrics["gxpo/theta_k_error"] == 0.0
    assert metrics["gxpo/theta_k_relative_error"] == 0.0
    assert metrics["gxpo/displacement_cosine_error"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [(GxpoRule(k=4, gate=NEVER), 6), (SfpoRule(k=4, gate=NEVER), 6), (SfpoRule(k=4), 0), (GrpoRule(), 0)],
)
def test_every_rule_that_looks_ahead_is_diagnosed_until_its_gate_has_fired(settings: Any, passes: int) -> None:
    rank = LearnerRank(RunConfig.model_validate({"diagnostics": {"noise_floor": True}}), 0, 1)
    rank.learner = RankLearner(START, quadratic(CURVATURE), lr=0.1)  # type: ignore[assignment]
    rank.rule = make_rule(settings)
    if isinstance(settings, SfpoRule) and not passes:
        rank.rule.gate.state.active = False  # type: ignore[attr-defined]
    result = rank.train_step([None], 0.1, diagnose=True)  # type: ignore[list-item]
    assert result.diagnostic_passes == passes
    names = {"gxpo/theta_k_error", "gxpo/theta_tilde_error", "diagnostics/ratio_noise"}
    assert names & result.metrics.keys() == (names if passes else set())


def test_ratio_noise_is_the_root_mean_square_of_r_minus_one_over_active_coordinates() -> None:
    # r − 1 = 0.3, −0.4, 0 over three active coordinates: √(0.25/3). The fourth lies under δ.
    rows = [torch.tensor([1.0, 1.0, 2.0, 1e-9]), torch.tensor([1.3, 0.6, 2.0, 5.0])]
    learner = ToyLearner(torch.ones(4), lambda theta, taken: [rows[taken]])
    assert ratio_noise(learner, make_rule(GxpoRule())) == {"diagnostics/ratio_noise": pytest.approx((0.25 / 3) ** 0.5)}
    assert learner.passes == 2
    silent = ToyLearner(torch.ones(4), lambda theta, taken: [torch.zeros(4)])
    assert ratio_noise(silent, make_rule(GxpoRule())) == {}


def test_prediction_errors_by_hand() -> None:
    # From (1, 1, 1): predicted (3, 0, 4), true (4, 0, 3): distances 1, 0, 1, median 1; relative √(2/25); cos 24/25.
    learner = ToyLearner(torch.ones(3), lambda theta, _: theta)
    start = [torch.ones(3)]
    errors = prediction_error(
        learner, Trajectory([torch.tensor([5.0, 1.0, 4.0])], 3), [torch.tensor([4.0, 1.0, 5.0])], start
    )
    assert errors["gxpo/theta_k_error"] == pytest.approx(1.0)
    assert errors["gxpo/theta_k_relative_error"] == pytest.approx((2 / 25) ** 0.5)
    assert errors["gxpo/displacement_cosine_error"] == pytest.approx(1 / 25)
    # Distances 3, 2, 0.5.
    apart = prediction_error(
        learner, Trajectory([torch.tensor([5.0, 1.0, 4.0])], 3), [torch.tensor([8.0, 3.0, 4.5])], start
    )
    assert apart["gxpo/theta_k_error"] == pytest.approx(2.0)
    unmoved = prediction_error(learner, Trajectory(start, 3), [torch.tensor([4.0, 1.0, 5.0])], start)
    assert unmoved.keys() == {"gxpo/theta_k_error"}


def test_cosine_by_hand() -> None:
    learner = ToyLearner(torch.ones(2), lambda theta, _: theta)
    # (3, 4)·(8, 6) = 48 of 5·10.
    assert cosine(learner, [torch.tensor([3.0, 4.0])], [torch.tensor([8.0, 6.0])]) == pytest.approx(0.96)
    assert cosine(learner, [torch.zeros(2)], [torch.ones(2)]) is None
    assert cosine(learner, [torch.ones(2)], [torch.zeros(2)]) is None


def test_root_mean_squares_by_hand() -> None:
    learner = ToyLearner(torch.ones(2), lambda theta, _: theta)
    values, origin = [torch.tensor([3.0, 4.0])], [torch.tensor([2.0, 6.0])]
    # √((9 + 16)/2), of (3 − 2, 4 − 6): √((1 + 4)/2), and of (3 − 1, 4 − 3) the same.
    assert rms(learner, values) == pytest.approx(12.5**0.5)
    assert rms(learner, values, origin) == pytest.approx(2.5**0.5)
    assert rms(learner, values, origin, kept=0.5) == pytest.approx(2.5**0.5)


def test_a_trajectory_with_a_gradient_that_is_not_finite_is_none_and_undone() -> None:
    learner = ToyLearner(START, lambda theta, taken: [theta[0] * (float("nan") if taken == 1 else 1.0)], lr=0.1)
    assert take_trajectory(learner, 3) is None
    assert torch.equal(learner.flat(), START)
    assert (learner.passes, learner.optimizer_state().step, learner.published) == (2, 0, 1)
