"""Measurements that cost extra passes: a true K-step trajectory, and the noise floor of r.

Both restore parameters, optimizer state and the rule's state exactly; their passes are reported separately
(`update/diagnostic_passes_total`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gxpo_trainer.rules.contract import LookAheadRule, Rule, RuleLearner, chunks, reduce_sums, snapshot, sum_over
from gxpo_trainer.types import Metrics


def take_trajectory(learner: RuleLearner, k: int) -> tuple[list[Tensor] | None, int]:
    """The point that K steps from the current state reach, undone, and the passes taken; None and fewer than K passes
    when one of their gradients is not finite."""
    parameters = learner.parameters()
    state = learner.optimizer_state()
    theta0 = snapshot(parameters)
    moments = {name: snapshot(shards) for name, shards in state.moments().items()}
    step, passes, finite = state.step, 0, True
    while passes < k:
        finite = learner.backward().finite
        passes += 1
        if not finite:
            break
        learner.optimizer_step()
    reached = snapshot(parameters)
    snapshot(theta0, parameters)
    for name, shards in state.moments().items():
        snapshot(moments[name], shards)
    state.set_step(step)
    learner.publish()
    return reached if finite else None, passes


def diagnose(learner: RuleLearner, rule: Rule, *, noise_floor: bool) -> tuple[Metrics, int]:
    """Measurements before a step of a rule that looks ahead, and the passes they took; nothing for a plain step.

    The rule gets the trajectory, and measures its own points against it in its next step.
    """
    if not isinstance(rule, LookAheadRule) or not (k := rule.look_ahead_steps):
        return {}, 0
    metrics = ratio_noise(learner, rule) if noise_floor else {}
    rule.trajectory, passes = take_trajectory(learner, k)
    return metrics, passes + (2 if noise_floor else 0)


def prediction_error(
    learner: RuleLearner, truth: Sequence[Tensor], theta_k: Sequence[Tensor], theta0: Sequence[Tensor]
) -> Metrics:
    """`gxpo/theta_k_error` and related metrics: the θᴷ of a rule against the true one."""

    def terms(predicted: Tensor, true: Tensor, start: Tensor) -> Sequence[Tensor]:
        p, t = (predicted - start).double(), (true - start).double()
        return (p - t).square(), t.square(), p.square(), p * t

    error, true, predicted, dot = sum_over(learner, terms, theta_k, truth, theta0)
    distance = distributed_median(learner, lambda left, right: (left - right).abs(), theta_k, truth)
    out: Metrics = {"gxpo/theta_k_error": distance}
    if true > 0:
        out["gxpo/theta_k_relative_error"] = math.sqrt(error / true)
    if true > 0 and predicted > 0:
        out["gxpo/displacement_cosine_error"] = 1 - dot / math.sqrt(true * predicted)
    return out


def reposition_error(
    learner: RuleLearner, truth: Sequence[Tensor], theta_tilde: Sequence[Tensor], theta0: Sequence[Tensor], alpha: float
) -> Metrics:
    """`gxpo/theta_tilde_error`: θ̃ as the corrective pass uses it against θ⁰ + α(θᴷ_true − θ⁰)."""

    def error(used: Tensor, true: Tensor, start: Tensor) -> Tensor:
        origin = start.double()
        return (used.double() - (origin + alpha * (true.double() - origin))).abs()

    return {"gxpo/theta_tilde_error": distributed_median(learner, error, theta_tilde, truth, theta0)}


def ratio_noise(learner: RuleLearner, rule: LookAheadRule) -> Metrics:
    """Two gradients at the same point: the spread of r = g'/g due to noise, over active coordinates.

    In fp32 on a deterministic engine it is 0. Takes two passes.
    """
    learner.backward()
    held = snapshot(learner.gradients())
    threshold = rule.activity_threshold(learner, held)
    learner.backward()

    def terms(first: Tensor, second: Tensor) -> Sequence[Tensor]:
        active = first.abs() > threshold
        return active, torch.where(active, second / first - 1, 0.0).double().square()

    active, square = sum_over(learner, terms, held, learner.gradients())
    return {"diagnostics/ratio_noise": math.sqrt(square / active)} if active else {}


def distributed_median(learner: RuleLearner, function: Callable[..., Tensor], *shards: Sequence[Tensor]) -> float:
    """Lower median over all coordinates of all ranks of a function that maps slices to non-negative values.

    By bisection on counts: only counts are all-reduced, so no rank needs another's shard. The values are recomputed for
    each count, which limits memory to one slice. 64 halvings reach the last bit of fp32.
    """
    largest, count = 0.0, 0
    for parts in chunks(*shards):
        values = function(*parts)
        if values.numel():
            largest, count = max(largest, float(values.max())), count + values.numel()
    device = shards[0][0].device
    # The sum of the ranks' maxima bounds the maximum.
    high, total = reduce_sums(learner, torch.tensor([largest, count], dtype=torch.float64, device=device))
    low = 0.0
    for _ in range(64):
        middle = (low + high) / 2
        counts = ((function(*parts) <= middle).sum(dtype=torch.float64) for parts in chunks(*shards))
        (reached,) = reduce_sums(learner, torch.stack(list(counts)).sum()[None])
        if reached >= total / 2:
            high = middle
        else:
            low = middle
    return high
