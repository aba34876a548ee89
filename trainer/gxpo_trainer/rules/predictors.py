"""The predictors: how two probes become θᴷ, and the move part of the way to it.

GXPO (arXiv 2605.06755) eq. 6–9. Per coordinate, with S_n(r) = 1 + r + … + rⁿ⁻¹:

    r = g¹/g⁰,  scale = S_K(r)/S_2(r) where |g⁰| > δ, else 1
    θᴷ = θ⁰ + (θ² − θ⁰)·scale,   θ̃ = θ⁰ + α(θᴷ − θ⁰)

Differs from the paper: r and the scale are clamped as its authors' code does (a |g⁰| just over δ would
otherwise produce an arbitrarily large step), and the scale is evaluated without 0/0 at r = ±1.

The arithmetic of a predictor is a function on one slice of a shard, fused into one pass: it reads the probes, writes θ̃
over θ², and returns the sums that the metrics need. On a GPU it is compiled into one kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.rules.contract import Recurrence, RuleLearner, chunks, reduce_sums, rms
from gxpo_trainer.types import Metrics

FIELDS = ("count", "active", "ratio", "ratio_square", "scale", "clipped", "ahead_square", "probed_square")
"""The sums that a pass returns, float64 [8]; see `Predictor.metrics`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one extrapolation, as numbers.

    threshold: a coordinate is active where its first gradient (`displacement`: its first step) exceeds it; a tensor []
    where it differs from step to step, because a number is compiled into the kernel.
    """

    k: int
    alpha: float
    threshold: float | Tensor
    ratio_clip: tuple[float, float] | None
    scale_clip: tuple[float, float] | None

    @classmethod
    def of(cls, settings: GxpoRule, threshold: float | Tensor, *, trial: bool) -> Plan:
        """trial: for θᴷ itself, α = 1."""
        ratio_clip = None if settings.ratio_clip == "none" else settings.ratio_clip
        return cls(settings.k, 1.0 if trial else settings.alpha, threshold, ratio_clip, settings.scale_bounds)


def geometric_scale(ratio: Tensor, k: int) -> Tensor:
    """S_K(r)/S_2(r), without 0/0 at r = ±1.

    With E = Σ_{j<⌊K/2⌋} r^{2j}: E for even K, exactly 1 at K = 2; 1/(1+r) + r·E for odd K, with a true pole at r = −1.
    A scale too large for a float is ±∞, which the clamp bounds; E + r^{K−1}/(1+r), the same, would be ∞ − ∞ there.
    """
    square = ratio * ratio
    total = torch.ones_like(ratio)
    for _ in range(k // 2 - 1):
        total = total * square + 1
    return 1 / (1 + ratio) + ratio * total if k % 2 else total


def extrapolate_by_ratio(plan: Plan, theta: Tensor, theta0: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The paper's rule on one slice, r = second/first: by its gradients g⁰ and g¹, or by displacements.

    theta: θ² in, θ̃ out; all flat and equally long. Returns FIELDS.
    """
    active = first.abs() > plan.threshold
    raw = torch.where(active, second / first, 1.0)
    ratio = raw if plan.ratio_clip is None else raw.clamp(*plan.ratio_clip)
    scale = geometric_scale(ratio, plan.k)
    if plan.scale_clip is not None:
        scale = scale.clamp(*plan.scale_clip)
    scale = torch.where(active, scale, 1.0)
    probed = theta - theta0
    ahead = probed * scale
    sums = _sums(active, ratio, scale, raw != ratio, ahead, probed)
    theta.copy_(theta0 + plan.alpha * ahead)  # θ̃ = θ⁰ + α(θᴷ − θ⁰)
    return sums


def extrapolate_by_displacement(plan: Plan, kept: float, theta: Tensor, theta0: Tensor, theta1: Tensor) -> Tensor:
    """r = d¹/d⁰ with d the step that the optimizer took, without the weight decay: kept = 1 − ηλ."""
    d0 = theta1 - theta0 * kept
    d1 = theta - theta1 * kept
    return extrapolate_by_ratio(plan, theta, theta0, d0, d1)


def extrapolate_by_replay(
    plan: Plan,
    recurrence: Recurrence,
    step: int,
    keep_moments: bool,
    num_probes: int,
    theta: Tensor,
    theta0: Tensor,
    g0: Tensor,
    g1: Tensor,
    *moments: Tensor,
) -> Tensor:
    """Run the optimizer itself for n = 2 … K−1 on gₙ = g¹·rⁿ⁻¹, r clamped to [0, 1].

    theta: θ² in, θ̃ out. `step` counts the optimizer steps so far, both probes included. The moments are
    read, and written only when `keep_moments` (probe state `fast_forward`). With one probe g¹ is g⁰, theta is θ¹, and n
    begins at 1.
    """
    active = g0.abs() > plan.threshold
    raw = torch.where(active, g1 / g0, 1.0)
    ratio = raw.clamp(0.0, 1.0)
    ahead = theta.clone()
    state = moments if keep_moments else [moment.clone() for moment in moments]
    gradient = g1.clone()
    for taken in range(1, plan.k - num_probes + 1):
        gradient.mul_(ratio)
        recurrence(ahead, state, gradient, step + taken)
    sums = _sums(active, ratio, torch.zeros_like(ratio), raw != ratio, ahead - theta0, theta - theta0)
    theta.copy_(theta0 + plan.alpha * (ahead - theta0))
    return sums


def _sums(active: Tensor, ratio: Tensor, scale: Tensor, clipped: Tensor, ahead: Tensor, probed: Tensor) -> Tensor:
    held = active.to(ratio.dtype)
    ratio = ratio * held
    terms = (held, ratio, ratio * ratio, scale * held, (clipped & active).to(ratio.dtype), ahead**2, probed**2)
    count = torch.full((), active.numel(), dtype=torch.float64, device=active.device)
    return torch.stack([count, *(term.sum(dtype=torch.float64) for term in terms)])


@dataclass
class Buffers:
    """Shard-sized copies, overwritten by every step while the gate is active; kept only to save the allocation."""

    theta0: list[Tensor] = field(default_factory=list)
    probe: list[Tensor] = field(default_factory=list)
    """g⁰, or θ¹ for the predictor `displacement`; empty with one probe."""
    moments: dict[str, list[Tensor]] = field(default_factory=dict)

    def count(self) -> int:
        """Shard-sized buffers held."""
        return bool(self.theta0) + bool(self.probe) + len(self.moments)


class Predictor:
    """The paper's predictor, by gradients: r = g¹/g⁰. The others differ in what the class attributes and methods say.

    holds_gradient, holds_point: whether `Buffers.probe` is g⁰ or θ¹; with one probe neither.
    """

    holds_point: ClassVar[bool] = False
    _has_scale: ClassVar[bool] = True

    def __init__(self, settings: GxpoRule) -> None:
        self.settings = settings
        self.holds_gradient = settings.probes == 2 and not self.holds_point

    def extrapolate(
        self, learner: RuleLearner, buffers: Buffers, theta: Sequence[Tensor], *, trial: bool
    ) -> dict[str, float]:
        """Overwrite `theta`, the point after the probes, with θ̃; returns the FIELDS summed over ranks.

        trial: with θᴷ instead (α = 1), and the optimizer's moments stay as they are.
        """
        plan = self._plan(theta, activity_threshold(self.settings, learner, buffers.probe), trial)
        shards = [theta, buffers.theta0, buffers.probe, learner.gradients()]
        return _run_over_shards(learner, extrapolate_by_ratio, [plan], shards)

    def metrics(self, sums: dict[str, float]) -> Metrics:
        """`gxpo/…` from the sums: retention and scale over active coordinates, the clamped r as used."""
        active = sums["active"]
        out: Metrics = {"gxpo/inactive_fraction": 1 - active / sums["count"]}
        if self.settings.probes == 1:
            return out
        if sums["probed_square"] > 0:
            out["gxpo/displacement_ratio"] = math.sqrt(sums["ahead_square"] / sums["probed_square"])
        if active > 0:
            mean = sums["ratio"] / active
            out["gxpo/retention_mean"] = mean
            out["gxpo/retention_std"] = math.sqrt(max(0.0, sums["ratio_square"] / active - mean * mean))
            out["gxpo/ratio_clipped_fraction"] = sums["clipped"] / active
            if self._has_scale:
                out["gxpo/scale_mean"] = sums["scale"] / active
        return out

    def _plan(self, theta: Sequence[Tensor], threshold: float, trial: bool) -> Plan:
        # A tensor, which a compiled kernel takes without being compiled again for each value.
        return Plan.of(self.settings, torch.tensor(threshold, device=theta[0].device), trial=trial)


class DisplacementPredictor(Predictor):
    """By the steps that the optimizer took: r = d¹/d⁰."""

    holds_point = True

    def extrapolate(
        self, learner: RuleLearner, buffers: Buffers, theta: Sequence[Tensor], *, trial: bool
    ) -> dict[str, float]:
        # A step carries the learning rate: |d⁰| > ηδ, which for plain gradient descent is the paper's |g⁰| > δ.
        recurrence = learner.recurrence()
        rate = recurrence.learning_rate
        kept = 1 - rate * recurrence.weight_decay
        theta0, theta1 = buffers.theta0, buffers.probe
        threshold = rate * self.settings.delta
        if self.settings.activity == "rms":
            threshold = self.settings.activity_rms * rms(learner, theta1, theta0, kept)
        plan = self._plan(theta, threshold, trial)
        return _run_over_shards(learner, extrapolate_by_displacement, [plan, kept], [theta, theta0, theta1])


class ReplayPredictor(Predictor):
    """By the optimizer's own recurrence on virtual gradients; with one probe all of them are g⁰."""

    _has_scale = False

    def extrapolate(
        self, learner: RuleLearner, buffers: Buffers, theta: Sequence[Tensor], *, trial: bool
    ) -> dict[str, float]:
        gradients, recurrence, state = learner.gradients(), learner.recurrence(), learner.optimizer_state()
        probes = [buffers.probe or gradients, gradients]
        plan = self._plan(theta, activity_threshold(self.settings, learner, probes[0]), trial)
        moments = [state.moments()[name] for name in recurrence.moment_names]
        keep_moments = self.settings.probe_state == "fast_forward" and not trial
        shards = [theta, buffers.theta0, *probes, *moments]
        numbers = [plan, recurrence, state.step, keep_moments, self.settings.probes]
        return _run_over_shards(learner, extrapolate_by_replay, numbers, shards)


PREDICTORS = {"gradient": Predictor, "displacement": DisplacementPredictor, "replay": ReplayPredictor}


def activity_threshold(settings: GxpoRule, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
    """Gradients up to this size have no ratio; `gradients` are those of θ⁰."""
    return settings.delta if settings.activity == "delta" else settings.activity_rms * rms(learner, gradients)


def _run_over_shards(
    learner: RuleLearner, function: Callable[..., Tensor], settings: Sequence[Any], shards: Sequence[Sequence[Tensor]]
) -> dict[str, float]:
    """One fused pass `function(*settings, *slices)` over all local shards; the FIELDS summed over ranks."""
    kernel = _compile(function, dynamic=True) if shards[0][0].is_cuda else function
    total = torch.zeros(len(FIELDS), dtype=torch.float64, device=shards[0][0].device)
    for parts in chunks(*shards):
        total += kernel(*settings, *parts)
    return dict(zip(FIELDS, reduce_sums(learner, total), strict=True))


_compile = functools.cache(torch.compile)
