"""Identities of GXPO in float64 (docs/algorithms/gxpo.md), on toy problems with torch.optim as the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.toy_learner import ToyLearner, finite_except, gxpo, quadratic, relative_error

from gxpo_trainer.config import GateConfig, GrpoRule, GxpoRule, SfpoRule
from gxpo_trainer.rules.diagnostics import take_trajectory
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.gxpo import GXPO
from gxpo_trainer.rules.sfpo import SFPO


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Tensors are float64 by default, so that identities hold to rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


BARE = {"ratio_clip": "none", "scale_clip": "none"}


def plain_steps(start, gradient, count, **learner):
    toy = ToyLearner(start, gradient, **learner)
    for _ in range(count):
        GRPO(GrpoRule()).step(toy)
    return toy


curvatures = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(curvatures, st.integers(2, 12), st.booleans(), st.integers(0, 2**31))
def test_one_step_on_a_diagonal_quadratic_lands_on_k_plus_1_descent_steps(curvature, k, bare, seed):
    # 0 < ηh ≤ 1 with η = 1, α = 1, δ = 0: r = 1 − ηh ∈ [0, 1), so the default clamps are inactive.
    start = torch.randn(len(curvature), generator=torch.Generator().manual_seed(seed)) + 0.1
    gradient = quadratic(torch.tensor(curvature))
    toy = ToyLearner(start, gradient, lr=1.0)
    gxpo(k=k, alpha=1.0, delta=0.0, **(BARE if bare else {})).step(toy)
    expected = plain_steps(start, gradient, k + 1, lr=1.0)
    assert toy.passes == 3
    assert relative_error(toy.flat(), expected.flat(), start) < 1e-9


def test_a_worked_example_by_hand():
    # L = θ²/2, η = 0.5, K = 3, α = 0.5, θ⁰ = 1: g⁰ = 1, θ¹ = 0.5, g¹ = 0.5, θ² = 0.25, r = 0.5,
    # scale = (1 + 0.5 + 0.25)/(1.5) = 7/6, θᴷ = 1 − 0.75·7/6 = 0.125, θ̃ = 0.5625, θ = 0.28125.
    toy = ToyLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])), lr=0.5)
    report = gxpo(k=3, alpha=0.5).step(toy)
    assert toy.flat().item() == pytest.approx(0.28125, rel=1e-12)
    expected = {"gxpo/retention_mean": 0.5, "gxpo/scale_mean": 7 / 6, "gxpo/displacement_ratio": 7 / 6}
    expected |= {"grad/norm_slow": 0.5625, "update/norm": 1 - 0.28125}
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)
    assert report.backward_passes == 3


@pytest.mark.parametrize(("predictor", "cosine"), [("gradient", 0.96), ("replay", 0.96), ("displacement", None)])
def test_the_cosine_of_the_first_and_the_corrective_gradient_by_hand(predictor, cosine):
    # g⁰ = (3, 4) and g_slow = (4, 3): 24/(5·5). The displacement rule does not keep g⁰.
    gradients = torch.tensor([[3.0, 4.0], [1.5, 2.0], [4.0, 3.0]])
    toy = ToyLearner(torch.tensor([1.0, -2.0]), lambda theta, taken: [gradients[taken]], lr=0.1)
    metrics = gxpo(k=3, predictor=predictor).step(toy).metrics
    assert metrics.get("grad/cos_g0_slow") == (None if cosine is None else pytest.approx(cosine, rel=1e-12))


@settings(max_examples=40, deadline=None)
@given(st.floats(0.0, 1.0), st.sampled_from(["sgd", "adamw"]), st.floats(0, 0.1), st.integers(0, 2**31))
def test_k2_gxpo_equals_sfpo_optimizer_state_included(alpha, optimizer, decay, seed):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(5, 5, generator=generator)
    gradient = quadratic(basis @ basis.T / 5)
    start = torch.randn(5, generator=generator)
    kind = {"optimizer": optimizer, "lr": 0.05, "momentum": 0.9, "weight_decay": decay, "max_grad_norm": 1.0}
    left, right = ToyLearner(start, gradient, **kind), ToyLearner(start, gradient, **kind)
    one, two = gxpo(k=2, alpha=alpha), SFPO(SfpoRule(k=2, alpha=alpha, gate={"mode": "never"}))
    for _ in range(3):
        one.step(left)
        two.step(right)
    assert relative_error(left.flat(), right.flat(), start) < 1e-9
    for name, shards in left.optimizer_state().moments().items():
        assert torch.allclose(shards[0], right.optimizer_state().moments()[name][0], rtol=1e-9, atol=1e-15)
    assert left.optimizer_state().step == right.optimizer_state().step == 9


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
def test_a_fired_gate_is_grpo_to_the_bit(predictor):
    gradient = quadratic(torch.tensor([0.3, 0.7, 1.0]))
    start = torch.tensor([1.0, -2.0, 0.5])
    toy = ToyLearner(start, gradient, optimizer="adamw", lr=0.01)
    rule = gxpo(k=5, predictor=predictor)
    rule.step(toy)
    rule.gate.state.active = False
    twin = ToyLearner(toy.flat(), gradient, optimizer="adamw", lr=0.01)
    for name, shards in toy.optimizer_state().moments().items():
        twin.optimizer_state().moments()[name][0].copy_(shards[0])
    twin.optimizer_state().set_step(toy.optimizer_state().step)
    for _ in range(4):
        report = rule.step(toy)
        GRPO().step(twin)
        assert report.backward_passes == 1
    assert torch.equal(toy.flat(), twin.flat())
    assert rule.buffers.count() == 0


def test_replay_with_plain_descent_equals_the_bare_gradient_rule():
    gradient = quadratic(torch.tensor([0.05, 0.4, 0.99]))
    start = torch.tensor([1.0, -1.0, 2.0])
    for k in range(2, 9):
        left, right = ToyLearner(start, gradient, lr=1.0), ToyLearner(start, gradient, lr=1.0)
        gxpo(k=k, alpha=0.7, predictor="replay").step(left)
        gxpo(k=k, alpha=0.7, delta=0.0, **BARE).step(right)
        assert relative_error(left.flat(), right.flat(), start) < 1e-9


def geometric(g0, ratio):
    """A loss whose gradient is geometric per coordinate in the number of passes taken: g⁰·rⁿ."""
    return lambda theta, taken: [g0 * ratio**taken]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    st.integers(2, 10),
    st.floats(0, 0.1),
    st.sampled_from(["adamw", "sgd"]),
)
def test_replay_lands_on_the_true_k_step_point_of_a_geometric_gradient(ratios, k, decay, optimizer):
    start, g0 = torch.tensor([0.5, -1.5, 2.0]), torch.tensor([0.3, -0.2, 1.1])
    gradient = geometric(g0, torch.tensor(ratios))
    kind = {"optimizer": optimizer, "lr": 0.01, "weight_decay": decay, "momentum": 0.9}
    truth = ToyLearner(start, gradient, **kind)
    for _ in range(k):
        GRPO().step(truth)
    toy = ToyLearner(start, gradient, **kind)
    toy_points = []
    toy.publish = lambda: toy_points.append(toy.flat())
    rule = gxpo(k=k, alpha=1.0, predictor="replay", probe_state="fast_forward")
    toy_backward = toy.backward

    def watch():
        if toy.passes == 2:  # the corrective pass: state as K steps would have left it
            for name, shards in toy.optimizer_state().moments().items():
                expected = truth.optimizer_state().moments()[name][0]
                assert torch.allclose(shards[0], expected, rtol=1e-9, atol=1e-14)
            assert toy.optimizer_state().step == k
        return toy_backward()

    toy.backward = watch
    rule.step(toy)
    assert relative_error(toy_points[0], truth.flat(), start) < 1e-9


def test_one_probe_replays_a_constant_gradient_exactly_in_two_passes():
    start, g0 = torch.tensor([0.5, -1.5]), torch.tensor([0.3, -0.2])
    gradient = geometric(g0, torch.ones(2))
    truth = plain_steps(start, gradient, 7, optimizer="adamw", lr=0.01)
    toy = ToyLearner(start, gradient, optimizer="adamw", lr=0.01)
    rule = gxpo(k=6, alpha=1.0, predictor="replay", probes=1, probe_state="fast_forward")
    report = rule.step(toy)
    assert report.backward_passes == toy.passes == 2
    assert relative_error(toy.flat(), truth.flat(), start) < 1e-9
    assert not {"grad/norm_g1", "gxpo/retention_mean"} & report.metrics.keys()
    assert rule.buffers.count() == 1


def test_rollback_shows_the_optimizer_one_step_not_three():
    start = torch.tensor([0.5, -1.5])
    toy = ToyLearner(start, geometric(torch.tensor([0.3, 0.2]), torch.tensor([0.5, 0.9])), optimizer="adamw", lr=0.01)
    gxpo(k=5, probe_state="rollback").step(toy)
    # m after one step from zero on the corrective gradient alone: (1 − β1)·g_slow.
    expected = 0.1 * torch.tensor([0.3 * 0.25, 0.2 * 0.81])
    assert toy.optimizer_state().step == 1
    assert torch.allclose(toy.optimizer_state().moments()["exp_avg"][0], expected, rtol=1e-12)


@pytest.mark.parametrize("k", [3, 4, 5, 10])
def test_the_clamps_bound_a_coordinate_whose_first_gradient_is_just_over_delta(k):
    # |g⁰| barely over δ makes r huge; the clamped scale is at most K/2 + 1.
    gradient = geometric(torch.tensor([1.1e-8]), torch.tensor([1e6]))
    toy = ToyLearner(torch.tensor([1.0]), gradient, optimizer="adamw", lr=1e-3)
    report = gxpo(k=k, alpha=1.0).step(toy)
    assert report.metrics["gxpo/scale_mean"] <= k / 2 + 1
    assert report.metrics["gxpo/ratio_clipped_fraction"] == 1.0
    assert report.metrics["gxpo/displacement_ratio"] <= k / 2 + 1


def test_passes_are_three_while_active_and_one_after():
    # Corrective norms 1, 1, 1, then 100: with w = 3, warm-up 3 the fourth step's z is huge; s* = 4.
    norms = iter([1.0] * 9 + [1.0, 1.0, 100.0] + [1.0] * 10)
    toy = ToyLearner(torch.tensor([0.0]), lambda theta, taken: [torch.tensor([next(norms)])], lr=1e-3)
    rule = GXPO(GxpoRule(k=3, gate=GateConfig(threshold=2.0, window=3, warmup=3)))
    reports = [rule.step(toy) for _ in range(7)]
    total, s_star = len(reports), 4
    assert sum(r.backward_passes for r in reports) == 3 * s_star + total - s_star
    assert reports[3].metrics["gate/shutoff_step"] == 4
    assert reports[3].metrics["gate/active"] == 0
    assert "gate/z" not in reports[4].metrics


@pytest.mark.parametrize("active", [True, False])
def test_the_gate_ignores_a_step_without_a_gradient(active):
    # Every group of the batch has equal rewards. In the window, its norm of 0 would make any other an alarm.
    toy = ToyLearner(torch.tensor([1.0]), lambda theta, taken: [torch.zeros(1)])
    rule = GXPO(GxpoRule(k=3, gate=GateConfig(mode="rearm")))
    rule.gate.state.active, rule.gate.state.cooldown = active, 3
    report = rule.step(toy)
    assert report.finite
    assert "gate/value" not in report.metrics
    assert (rule.gate.state.window, rule.gate.state.cooldown) == ([], 3)


def test_the_gate_and_reported_norms_see_the_norm_before_clipping_and_r_the_clipped_gradient():
    gradient = quadratic(torch.tensor([1.0]))
    toy = ToyLearner(torch.tensor([10.0]), gradient, lr=1.0, max_grad_norm=1.0)
    metrics = gxpo(k=3).step(toy).metrics
    assert (metrics["grad/norm_g0"], metrics["grad/norm_g1"]) == (10.0, 9.0)
    assert metrics["gxpo/retention_mean"] == pytest.approx(1.0)  # both were clipped to 1


def test_a_trajectory_is_taken_and_undone_and_replay_predicts_it():
    start, g0, ratio = torch.tensor([0.5, -1.5, 1.0]), torch.tensor([0.3, -0.2, 0.1]), torch.tensor([0.9, 0.5, 0.1])
    base = ToyLearner(start, geometric(g0, ratio), optimizer="adamw", lr=0.01)
    truth, _ = take_trajectory(base, 6)
    assert torch.equal(base.flat(), start)
    assert base.optimizer_state().step == 0
    assert base.passes == 6
    assert all(not m[0].any() for m in base.optimizer_state().moments().values())
    errors = {}
    for predictor in ("replay", "gradient"):
        toy = ToyLearner(start, geometric(g0, ratio), optimizer="adamw", lr=0.01)
        rule = gxpo(k=6, alpha=0.5, predictor=predictor)
        rule.trajectory = truth
        errors[predictor] = rule.step(toy).metrics
    assert errors["replay"]["gxpo/theta_k_relative_error"] < 1e-9
    assert errors["gradient"]["gxpo/theta_k_relative_error"] > 1e-3
    assert errors["gradient"]["gxpo/theta_tilde_error"] == pytest.approx(0.5 * errors["gradient"]["gxpo/theta_k_error"])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(3, 8), st.floats(0.0, 0.2), st.integers(0, 2**31))
def test_random_quadratics_stay_within_the_error_bound(size, k, coupling, seed):
    # ‖θᴷ_pred − θᴷ_true‖ with diagonal rates 1 − ηh_ii stays under K(K−1)/2·η²‖H_off‖‖g₀‖ρ^{K−2};
    # the implemented rule adds the terms of the measured ratios (docs/algorithms/gxpo.md).
    generator = torch.Generator().manual_seed(seed)
    off = torch.randn(size, size, generator=generator) * coupling
    off = (off + off.T) / 2
    off.fill_diagonal_(0)
    h = torch.diag(torch.rand(size, generator=generator) * 0.9 + 0.05) + off
    eta, delta = 0.5, 1e-3
    start = torch.randn(size, generator=generator)
    g0 = h @ start
    g1 = h @ (start - eta * g0)
    points = []
    toy = ToyLearner(start, quadratic(h), lr=eta)
    toy.publish = lambda: points.append(toy.flat().clone())
    gxpo(k=k, alpha=1.0, delta=delta, **BARE).step(toy)
    true = start.clone()
    for _ in range(k):
        true = true - eta * (h @ true)
    rho = max(1.0, torch.linalg.matrix_norm(torch.eye(size) - eta * h, 2).item())
    surrogate = k * (k - 1) / 2 * eta**2 * torch.linalg.matrix_norm(off, 2) * g0.norm() * rho ** (k - 2)
    active = g0.abs() > delta
    rates = torch.cat([(g1 / g0)[active].abs(), (1 - eta * h.diagonal()).abs(), torch.ones(1)])
    bound_rate = rates.max().item()
    c = sum(n * bound_rate ** (n - 1) for n in range(1, k))
    d = 2 + sum(bound_rate**n for n in range(k))
    off_inf = torch.linalg.matrix_norm(off, float("inf"))
    extra = eta**2 * c * off_inf * g0.abs().max() * g0[active].norm() / delta
    extra += eta * d * g0[~active].abs().sum() + eta**2 * (h @ g0)[~active].abs().sum()
    assert (points[0] - true).norm() <= surrogate + extra + 1e-12
    # The diagonal surrogate itself, by its definition.
    diagonal = sum((1 - eta * h.diagonal()) ** n for n in range(k)) * g0
    assert (start - eta * diagonal - true).norm() <= surrogate + 1e-12


HALVING = {"betas": (0.5, 0.5), "optimizer": "adamw", "lr": 0.1}


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(("optimizer", "state"), [("sgd", "keep"), ("adamw", "rollback")])
def test_a_gradient_that_is_not_finite_falls_back_to_the_first_probe(predictor, at, optimizer, state):
    gradient = quadratic(torch.tensor([0.2, 0.9]))
    start = torch.tensor([1.0, -2.0])
    broken = finite_except(at)
    toy = ToyLearner(start, lambda theta, n: gradient(broken(theta, n), n), optimizer=optimizer, lr=0.1)
    rule = gxpo(k=5, predictor=predictor, probe_state=state)
    report = rule.step(toy)
    theta1 = plain_steps(start, gradient, 1, optimizer=optimizer, lr=0.1).flat()
    assert relative_error(toy.flat(), theta1, start) < 1e-9
    assert report.fallback is not None
    repeats = (at, predictor, state) == (2, "displacement", "rollback")
    assert (report.finite, report.backward_passes) == (True, at + 1 + repeats)
    assert toy.published == (0 if at == 1 else 2), "θ̃ for the corrective pass, then the point returned to"
    assert ("grad/norm_g1" in report.metrics) is (at == 2), "a norm that is not finite is no value"
    assert "gate/value" not in report.metrics
    assert rule.gate.state.window == []


def test_a_first_gradient_that_is_not_finite_skips_the_step():
    toy = ToyLearner(torch.tensor([1.0]), finite_except(0))
    report = gxpo(k=5).step(toy)
    assert (report.finite, report.backward_passes, toy.flat().item()) == (False, 1, 1.0)


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


@pytest.mark.parametrize("predictor", ["gradient", "displacement", "replay"])
def test_a_rolled_back_fallback_leaves_the_state_of_one_step(predictor):
    toy = ToyLearner(torch.tensor([1.0]), constant_then_nan([1.0, 0.5, math.nan, 1.0], at=2), **HALVING)
    gxpo(k=5, probe_state="rollback", predictor=predictor).step(toy)
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


START = torch.tensor([2.0, 0.02, 0.002], dtype=torch.float64)
"""g⁰ = (1, 0.01, 0.001): root mean square 0.5774, 1e-2 of which lies between the second and the third."""


@pytest.mark.parametrize(
    ("rule", "inactive", "third"),
    [
        # r = 1 − ηh = 0.75. Active: θᴷ = θ⁰ r⁴ and one corrective step more. Inactive: θ² and the corrective step.
        ({}, 0.0, 0.75**5),
        ({"activity": "rms"}, 1 / 3, 0.75**3),
        ({"activity": "rms", "predictor": "displacement"}, 1 / 3, 0.75**3),
        # Inactive in `replay` means a constant virtual gradient: θ² − 2η g¹, then the corrective step.
        ({"activity": "rms", "predictor": "replay"}, 1 / 3, (0.75**2 - 2 * 0.25 * 0.75) * 0.75),
    ],
)
def test_coordinates_are_extrapolated_above_delta_or_a_share_of_the_root_mean_square(rule, inactive, third):
    toy = ToyLearner(START, quadratic(torch.full((3,), 0.5)), lr=0.5)
    metrics = gxpo(k=4, alpha=1.0, activity_rms=1e-2, **rule).step(toy).metrics
    assert metrics["gxpo/inactive_fraction"] == pytest.approx(inactive)
    assert toy.flat().tolist() == pytest.approx([2 * 0.75**5, 0.02 * 0.75**5, 0.002 * third], rel=1e-12)
