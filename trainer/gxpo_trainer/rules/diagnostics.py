"""Measurements that cost extra passes: a true K-step trajectory, and the noise floor of r.

Both leave parameters, optimizer state and the rule's state exactly as they found them; their passes are
reported apart (`update/diagnostic_passes_total`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gxpo_trainer.rules.base import RuleLearner
from gxpo_trainer.rules.plain import reduce_sums, snapshot, sum_over
from gxpo_trainer.types import Metrics


@dataclass(frozen=True)
class Trajectory:
    """Where K real optimizer steps on the batch lead from θ⁰, and the passes that it took to know."""

    theta_k: list[Tensor]
    backward_passes: int


def take_trajectory(learner: RuleLearner, k: int) -> Trajectory | None:
    """K steps from the present state, taken and undone; None when a gradient on the way is not finite."""
    parameters = learner.parameters()
    state = learner.optimizer_state()
    theta0 = snapshot(parameters, None)
    moments = {name: snapshot(shards, None) for name, shards in state.moments().items()}
    step = state.step
    passes = 0
    finite = True
    for _ in range(k):
        finite = learner.backward().finite
        passes += 1
        if not finite:
            break
        learner.optimizer_step()
    reached = snapshot(parameters, None)
    snapshot(theta0, parameters)
    for name, shards in state.moments().items():
        snapshot(moments[name], shards)
    state.set_step(step)
    learner.publish()
    return Trajectory(reached, passes) if finite else None


def prediction_error(
    learner: RuleLearner, truth: Trajectory, theta_k: list[Tensor], theta0: list[Tensor], alpha: float
) -> Metrics:
    """`gxpo/theta_k_error` and its kin: a predicted θᴷ against the true one."""

    def sums(predicted: Tensor, true: Tensor, start: Tensor) -> Tensor:
        p, t = (predicted - start).double(), (true - start).double()
        return torch.stack([(p - t).square().sum(), t.square().sum(), p.square().sum(), (p * t).sum()])

    error, true, predicted, dot = sum_over(learner, sums, theta_k, truth.theta_k, theta0)
    errors = [(p - t).abs() for p, t in zip(theta_k, truth.theta_k, strict=True)]
    median = distributed_median(learner, errors)
    out: Metrics = {"gxpo/theta_k_error": median, "gxpo/theta_tilde_error": alpha * median}
    if true > 0:
        out["gxpo/theta_k_relative_error"] = math.sqrt(error / true)
    if true > 0 and predicted > 0:
        out["gxpo/displacement_cosine_error"] = 1 - dot / math.sqrt(true * predicted)
    return out


def ratio_noise(learner: RuleLearner, delta: float) -> Metrics:
    """Two gradients at the same point: the spread of r = g'/g that is noise, over active coordinates.

    In fp32 on a deterministic engine it is 0. Takes two passes.
    """
    learner.backward()
    held = snapshot(learner.gradients(), None)
    learner.backward()

    def sums(first: Tensor, second: Tensor) -> Tensor:
        active = first.abs() > delta
        off = torch.where(active, second / first - 1, 0.0).double()
        return torch.stack([active.sum().double(), off.square().sum()])

    active, square = sum_over(learner, sums, held, learner.gradients())
    return {"diagnostics/ratio_noise": math.sqrt(square / active)} if active else {}


def distributed_median(learner: RuleLearner, values: list[Tensor]) -> float:
    """Lower median of non-negative values over all ranks, by bisection on counts.

    Only counts are all-reduced, so no rank needs another's shard. 64 halvings reach the last bit of fp32.
    """
    largest = max(float(v.max()) for v in values if v.numel())
    count = sum(v.numel() for v in values)
    # The sum of the ranks' maxima bounds the maximum.
    high, total = reduce_sums(learner, torch.tensor([largest, count], dtype=torch.float64, device=values[0].device))
    low = 0.0
    for _ in range(64):
        middle = (low + high) / 2
        below = sum((v <= middle).sum(dtype=torch.float64) for v in values)
        (reached,) = reduce_sums(learner, torch.as_tensor(below, dtype=torch.float64).reshape(1))
        if reached >= total / 2:
            high = middle
        else:
            low = middle
    return high
