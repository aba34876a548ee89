"""The predictors' arithmetic against direct evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.toy_learner import RankLearner, ToyLearner, finite_except, gxpo, on_ranks, quadratic

from gxpo_trainer.config import GrpoRule, GxpoRule, RunConfig, SfpoRule
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.rules.contract import AdamWRecurrence, SGDRecurrence, cosine, make_rule, rms
from gxpo_trainer.rules.diagnostics import diagnose, distributed_median, prediction_error, ratio_noise, take_trajectory
from gxpo_trainer.rules.gxpo import GXPO
from gxpo_trainer.rules.predictors import geometric_scale


@settings(max_examples=200, deadline=None)
@given(st.floats(-2, 3), st.integers(2, 12))
def test_scale_is_the_ratio_of_geometric_sums(ratio, k):
    if abs(1 + ratio) < 1e-3:
        return  # next to the pole of odd K; the points themselves are tested below
    direct = sum(ratio**n for n in range(k)) / (1 + ratio)
    assert geometric_scale(torch.tensor([ratio], dtype=torch.float64), k).item() == pytest.approx(direct, rel=1e-9)


@pytest.mark.parametrize("k", range(2, 12))
def test_scale_at_plus_and_minus_one(k):
    # r = 1: K/2. r = −1, K even: S_K and S_2 both vanish, the limit is K/2; K odd: a true pole.
    plus, minus = geometric_scale(torch.tensor([1.0, -1.0], dtype=torch.float64), k).tolist()
    assert plus == k / 2
    assert minus == (np.inf if k % 2 else k / 2)

    assert torch.equal(geometric_scale(torch.tensor([-1.0, 0.0, 1.0, 1e30, -7.3]), 2), torch.ones(5))


def test_the_scale_of_a_large_odd_k_overflows_to_its_sign_instead_of_to_nan() -> None:
    # In fp32 2^200 is infinite. S_K(−2)/S_2(−2) = (1 + 2^201)/3 / (−1), which is far below the lower clamp.
    scale = geometric_scale(torch.tensor([-2.0, 3.0], dtype=torch.float32), 201)
    assert scale.tolist() == [-np.inf, np.inf]
    # r = −5 is clamped to −2 and the scale to 1: θ² = 1 − 0.1·(1 − 5) = 1.4, θ̃ = 1 + 0.5·0.4, θ = 1.2 − 0.1·1.
    gradients = [1.0, -5.0, 1.0]
    start = torch.tensor([1.0], dtype=torch.float32)
    toy = ToyLearner(start, lambda _, taken: [torch.tensor([gradients[taken]], dtype=torch.float32)])
    report = gxpo(k=201).step(toy)
    assert report.metrics["gxpo/scale_mean"] == 1.0
    assert toy.flat().item() == pytest.approx(1.1, rel=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
def test_recurrence_repeats_torch_optim(kind, decay):
    torch.manual_seed(0)
    theta = torch.randn(50, dtype=torch.float64)
    gradients = torch.randn(4, 50, dtype=torch.float64)
    live = theta.clone().requires_grad_()
    if kind == "adamw":
        optimizer = torch.optim.AdamW([live], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
        recurrence = AdamWRecurrence(0.01, 0.8, 0.95, 1e-6, decay)
    else:
        momentum = 0.9 if kind == "momentum" else 0.0
        optimizer = torch.optim.SGD([live], lr=0.01, momentum=momentum, weight_decay=decay)
        recurrence = SGDRecurrence(0.01, momentum, decay)
    moments = [torch.zeros(50, dtype=torch.float64) for _ in recurrence.moment_names]
    for n, gradient in enumerate(gradients, start=1):
        live.grad = gradient.clone()
        optimizer.step()
        before = theta.clone()
        recurrence(theta, moments, gradient, n)
        assert torch.allclose(theta, live, rtol=1e-12, atol=1e-14)
        assert torch.allclose(before + recurrence.displacement(before, moments, gradient, n), theta, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=40), st.integers(1, 3))
def test_median_by_bisection_is_the_lower_median_of_all_ranks_on_each(values, ranks):
    shards = [torch.tensor(values[rank::ranks], dtype=torch.float32) for rank in range(ranks)]
    medians = on_ranks(ranks, lambda learner, rank: distributed_median(learner, torch.abs, [shards[rank]]))
    expected = np.sort(np.asarray(values, dtype=np.float32))[(len(values) - 1) // 2]
    assert medians == pytest.approx([float(expected)] * ranks, rel=1e-6, abs=1e-12)


def metrics_of(gradients, lr=0.1, weight_decay=0.0, **rule):
    """Metrics of one GXPO step on gradients that are the same wherever θ is."""
    table = [torch.tensor(row, dtype=torch.float64) for row in gradients]
    start = torch.ones(len(table[0]), dtype=torch.float64)
    toy = ToyLearner(start, lambda theta, taken: [table[taken]], lr=lr, weight_decay=weight_decay)
    return GXPO(GxpoRule(gate={"mode": "never"}, **rule)).step(toy).metrics


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
def test_retention_is_described_by_its_mean_and_population_std_over_active_coordinates(predictor):
    # r = 0.2, 0.8 and one inactive coordinate: mean 0.5, spread 0.3. K = 4: scale 1 + r² = 1.04 and 1.64, mean 1.34.
    metrics = metrics_of([[1.0, 1.0, 0.0], [0.2, 0.8, 0.7], [1.0] * 3], k=4, delta=1e-3, predictor=predictor)
    expected = {"retention_mean": 0.5, "retention_std": 0.3, "inactive_fraction": 1 / 3, "ratio_clipped_fraction": 0.0}
    assert {name: metrics[f"gxpo/{name}"] for name in expected} == pytest.approx(expected)
    assert metrics.get("gxpo/scale_mean") == (None if predictor == "replay" else pytest.approx(1.34))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_displacement_takes_the_weight_decay_out_of_the_ratio(decay):
    # SGD adds λθ to the gradient: θ¹ − (1 − ηλ)θ⁰ = −ηg⁰, so r = g¹/g⁰ whatever λ is.
    metrics = metrics_of([[1.0], [0.5], [1.0]], k=4, predictor="displacement", weight_decay=decay)
    assert metrics["gxpo/retention_mean"] == pytest.approx(0.5)


def test_a_coordinate_is_active_where_its_displacement_exceeds_the_rate_times_delta():
    # η = 0.1, δ = 0.2: |d⁰| = 0.1·|g⁰| against 0.02, so |g⁰| > 0.2 as in the rule by gradients.
    for predictor, edge in (("displacement", 0.19), ("gradient", 0.2), ("replay", 0.19)):
        gradients = [[0.1, edge, 0.21, 0.4], [0.1] * 4, [1.0] * 4]
        assert metrics_of(gradients, k=4, delta=0.2, predictor=predictor)["gxpo/inactive_fraction"] == 0.5


@pytest.mark.parametrize(("predictor", "clipped"), [("gradient", 1 / 3), ("displacement", 1 / 3), ("replay", 2 / 3)])
def test_the_clipped_fraction_counts_active_ratios_that_a_bound_changed(predictor, clipped):
    # r = −0.5, 0.5, 3 and an inactive coordinate of ratio 9; bounds [−1, 1], replay [0, 1].
    gradients = [[1.0, 1.0, 1.0, 1e-9], [-0.5, 0.5, 3.0, 9e-9], [1.0] * 4]
    rule = {} if predictor == "replay" else {"ratio_clip": (-1.0, 1.0)}
    metrics = metrics_of(gradients, k=4, delta=1e-3, predictor=predictor, **rule)
    assert metrics["gxpo/ratio_clipped_fraction"] == pytest.approx(clipped)


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
def test_the_displacement_ratio_is_that_of_lengths(predictor):
    # K = 4, r = (0, 1): scales 1 and 2. Probed (0.1·1, 0.1·2), ahead (0.1, 0.4): √(0.01 + 0.16)/√(0.01 + 0.04).
    metrics = metrics_of([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]], k=4, predictor=predictor)
    assert metrics["gxpo/displacement_ratio"] == pytest.approx((0.17 / 0.05) ** 0.5)


@pytest.mark.parametrize(
    ("gradients", "rule", "inactive"),
    [
        ([[0.1, 0.3, 0.5, 0.7], [1.0] * 4], {"delta": 0.2, "predictor": "replay", "probes": 1}, 0.25),
        ([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]], {}, 1.0),
    ],
)
def test_with_one_probe_or_without_a_gradient_there_is_neither_a_displacement_nor_a_ratio(gradients, rule, inactive):
    metrics = metrics_of(gradients, k=4, **rule)
    assert metrics["gxpo/inactive_fraction"] == inactive
    assert not {"gxpo/displacement_ratio", "gxpo/retention_mean", "gxpo/scale_mean"} & metrics.keys()


# Trajectory diagnostics: what a rule used against K real steps, for every rule that looks ahead.


NEVER = {"mode": "never"}
CURVATURE = torch.tensor([0.9, 0.5, 0.2, 0.1, 0.05])
START = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7])


@pytest.mark.parametrize("settings", [GxpoRule(k=4, alpha=0.3, gate=NEVER), SfpoRule(k=4, alpha=0.3, gate=NEVER)])
def test_the_error_of_theta_tilde_is_measured_on_the_point_that_was_used(settings: Any) -> None:
    points: list[torch.Tensor] = []

    def gradient(theta: list[torch.Tensor], _: int) -> list[torch.Tensor]:
        points.append(theta[0].clone())
        return [CURVATURE * theta[0]]

    learner = ToyLearner(START, gradient, lr=1e-6)  # fp32, and steps so small that rounding shows
    rule: Any = make_rule(settings)
    rule.trajectory, _ = truth, passes = take_trajectory(learner, settings.k)
    assert truth is not None
    assert passes == settings.k
    metrics = rule.step(learner).metrics
    used = points[-1].double()
    start = START.double()
    target = start + settings.alpha * (truth[0].double() - start)
    expected = (used - target).abs().median().item()
    assert expected > 0
    assert metrics["gxpo/theta_tilde_error"] == pytest.approx(expected, rel=1e-6)
    assert rule.trajectory is None


def test_the_k_real_steps_of_sfpo_are_their_own_trajectory() -> None:
    learner = ToyLearner(START, quadratic(CURVATURE), lr=0.1)
    rule: Any = make_rule(SfpoRule(k=3, gate=NEVER))
    rule.trajectory, _ = take_trajectory(learner, 3)
    metrics = rule.step(learner).metrics
    assert metrics["gxpo/theta_k_error"] == metrics["gxpo/theta_k_relative_error"] == 0.0
    assert metrics["gxpo/displacement_cosine_error"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [(GxpoRule(k=4, gate=NEVER), 6), (SfpoRule(k=4, gate=NEVER), 6), (SfpoRule(k=4), 0), (GrpoRule(), 0)],
)
def test_every_rule_that_looks_ahead_is_diagnosed_until_its_gate_has_fired(settings: Any, passes: int) -> None:
    rank = LearnerRank(RunConfig.model_validate({"diagnostics": {"trajectory_every": 1, "noise_floor": True}}), 0, 1)
    rank.learner = RankLearner(START, quadratic(CURVATURE), lr=0.1)  # type: ignore[assignment]
    rank.rule = make_rule(settings)
    if isinstance(settings, SfpoRule) and not passes:
        rank.rule.gate.state.active = False  # type: ignore[attr-defined]
    result = rank.train_step([None], 0.1, diagnose=True)  # type: ignore[list-item]
    assert result.diagnostic_passes == passes
    names = {"gxpo/theta_k_error", "gxpo/theta_tilde_error", "diagnostics/ratio_noise"}
    assert names & result.metrics.keys() == (names if passes else set())


def test_the_trajectory_of_the_first_step_after_a_warm_start_is_without_its_momentum() -> None:
    """SFPO takes the K steps of the trajectory itself, so that nothing lies between them."""
    rank = LearnerRank(RunConfig(), 0, 1)
    rank.learner = RankLearner(START, quadratic(CURVATURE), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    rank.rule = make_rule(SfpoRule(k=3, gate=NEVER))
    rank.train_step([None], 0.1, diagnose=False, stage="warm_start")  # type: ignore[list-item]
    result = rank.train_step([None], 0.1, diagnose=True, stage="first")  # type: ignore[list-item]
    assert result.metrics["gxpo/theta_k_error"] == pytest.approx(0.0, abs=1e-7)


def test_ratio_noise_is_the_root_mean_square_of_r_minus_one_over_active_coordinates() -> None:
    # r − 1 = 0.3, −0.4, 0 over three active coordinates: √(0.25/3). The fourth lies under δ.
    rows = [torch.tensor([1.0, 1.0, 2.0, 1e-9]), torch.tensor([1.3, 0.6, 2.0, 5.0])]
    learner = ToyLearner(torch.ones(4), lambda theta, taken: [rows[taken]])
    assert ratio_noise(learner, make_rule(GxpoRule())) == {"diagnostics/ratio_noise": pytest.approx((0.25 / 3) ** 0.5)}
    assert learner.passes == 2
    # SFPO predicts nothing: every coordinate with a gradient counts.
    rows = [torch.tensor([1e-9, 0.0, 0, 0]), torch.tensor([1.5e-9, 1.0, 1, 1])]
    for_sfpo = ratio_noise(ToyLearner(torch.ones(4), lambda theta, taken: [rows[taken]]), make_rule(SfpoRule()))
    assert for_sfpo == {"diagnostics/ratio_noise": pytest.approx(0.5)}
    silent = ToyLearner(torch.ones(4), lambda theta, taken: [torch.zeros(4)])
    assert ratio_noise(silent, make_rule(GxpoRule())) == {}


def test_prediction_errors_by_hand() -> None:
    # From (1, 1, 1): predicted (3, 0, 4), true (4, 0, 3): distances 1, 0, 1, median 1; relative √(2/25); cos 24/25.
    learner = ToyLearner(torch.ones(3), lambda theta, _: theta)
    start = [torch.ones(3)]
    errors = prediction_error(learner, [torch.tensor([5.0, 1.0, 4.0])], [torch.tensor([4.0, 1.0, 5.0])], start)
    assert errors["gxpo/theta_k_error"] == pytest.approx(1.0)
    assert errors["gxpo/theta_k_relative_error"] == pytest.approx((2 / 25) ** 0.5)
    assert errors["gxpo/displacement_cosine_error"] == pytest.approx(1 / 25)
    points = torch.tensor([5.0, 1.0, 4.0]), torch.tensor([4.0, 1.0, 5.0]), start[0]
    shared = on_ranks(3, lambda rank_learner, r: prediction_error(rank_learner, *([p[r : r + 1]] for p in points)))
    assert shared == [pytest.approx(errors)] * 3
    # Distances 3, 2, 0.5.
    apart = prediction_error(learner, [torch.tensor([5.0, 1.0, 4.0])], [torch.tensor([8.0, 3.0, 4.5])], start)
    assert apart["gxpo/theta_k_error"] == pytest.approx(2.0)
    unmoved = prediction_error(learner, start, [torch.tensor([4.0, 1.0, 5.0])], start)
    assert unmoved.keys() == {"gxpo/theta_k_error"}
    small = prediction_error(learner, [torch.tensor([1.5, 1.0, 1.0])], [torch.tensor([1.25, 1.0, 1.0])], start)
    assert small["gxpo/theta_k_relative_error"] == pytest.approx(0.5)
    assert small["gxpo/displacement_cosine_error"] == pytest.approx(0.0, abs=1e-12)


def test_cosine_and_root_mean_squares_by_hand() -> None:
    learner = ToyLearner(torch.ones(2), lambda theta, _: theta)
    # (3, 4)·(8, 6) = 48 of 5·10.
    assert cosine(learner, [torch.tensor([3.0, 4.0])], [torch.tensor([8.0, 6.0])]) == pytest.approx(0.96)
    assert cosine(learner, [torch.zeros(2)], [torch.ones(2)]) is None
    assert cosine(learner, [torch.ones(2)], [torch.zeros(2)]) is None

    values, origin = [torch.tensor([3.0, 4.0])], [torch.tensor([2.0, 6.0])]
    # √((9 + 16)/2), of (3 − 2, 4 − 6): √((1 + 4)/2), and of (3 − 1, 4 − 3) the same.
    assert rms(learner, values) == pytest.approx(12.5**0.5)
    assert rms(learner, values, origin) == pytest.approx(2.5**0.5)
    assert rms(learner, values, origin, kept=0.5) == pytest.approx(2.5**0.5)


def test_a_trajectory_with_a_gradient_that_is_not_finite_is_none_undone_and_counts_the_passes_it_took() -> None:
    learner = ToyLearner(START, finite_except(1), lr=0.1)
    assert diagnose(learner, make_rule(GxpoRule(k=3, gate=NEVER)), noise_floor=False) == ({}, 2)
    assert take_trajectory(ToyLearner(START, finite_except(1)), 3) == (None, 2)
    assert torch.equal(learner.flat(), START)
    assert (learner.passes, learner.optimizer_state().step, learner.published) == (2, 0, 1)
