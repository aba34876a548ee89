"""Candidates for a rule of our own, as plug-ins: tried on the embedded tasks before any becomes part of the product.

    [arms.noise-scale]
    overrides = ["learner.rule.name=studies.candidates:NoiseScaleRule", "learner.mini_batches=8"]

Each takes one backward pass a batch. What was expected of it and what came of it is in docs/algorithms/candidates.md.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config import LossSettings, RuleSettings
from gxpo_trainer.config.rules import Family
from gxpo_trainer.rules.contract import (
    RuleLearner,
    Stateless,
    chunks,
    finish_plain_step,
    norm,
    policy_metrics,
    reposition,
    snapshot,
)
from gxpo_trainer.types import StepReport


class NoiseScaleRule(RuleSettings):
    """Parts of a batch grouped into optimizer steps by the measured noise of their gradients."""

    label: ClassVar[str] = "Noise-scale splitting"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "studies.candidates:NoiseScale"

    name: Literal["noise-scale"] = "noise-scale"
    decay: float = Field(0.8, ge=0, lt=1, description="Of the running means that the noise scale is the ratio of.")
    shrink: bool = Field(True, description="Shorten a step to the share 1/(1 + noise scale/parts in it).")

    def shard_buffers(self, num_moments: int) -> int:
        """The sum of the parts' gradients, that of the group's, and θ before its step."""
        return 3


class NoiseScale:
    """With M mini-batches a training step has M parts of b prompts, one pass in all.

    The gradient's noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A), in parts:

        |G|² = (M |ḡ|² − mean |gᵢ|²) / (M − 1)
        S = (mean |gᵢ|² − |ḡ|²) · M / (M − 1)          trace of the covariance of a part's gradient
        B = S / |G|²                                   as the ratio of running means of S and |G|²

    The next training step takes an optimizer step after each max(1, min(M, ⌈B⌉)) parts, on the mean of their gradients:
    many steps while a part's gradient is mostly signal, one when it is mostly noise. Differs from the source: the
    gradients of the parts are taken at different points, because the parameters move between them.
    """

    name: ClassVar[str] = "noise-scale"

    def __init__(self, settings: NoiseScaleRule | None = None) -> None:
        self.settings = settings or NoiseScaleRule()
        self.signal = self.noise = 0.0
        self.parts_per_step = 1
        self.release_buffers()

    def release_buffers(self) -> None:
        """See contract.BufferingRule: within a training step nothing is kept on purpose."""
        self._total: list[Tensor] | None = None
        self._group: list[Tensor] | None = None
        self._theta0: list[Tensor] | None = None
        self._squares: list[float] = []
        self._in_group = 0

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See contract.Rule. A part whose gradient is not finite is left out."""
        first = learner.backward()
        metrics = {"grad/norm_g0": first.grad_norm, **policy_metrics([first])}
        if first.finite:
            self._collect(learner, first.grad_norm)
        if first.finite and (last or self._in_group == self.parts_per_step):
            self._take_step(learner)
        if last:
            metrics |= self._measure(learner)
            self.release_buffers()
        return StepReport(metrics, backward_passes=1, finite=first.finite)

    def _collect(self, learner: RuleLearner, grad_norm: float) -> None:
        """Add this part's gradient, as it was before clipping, to the two sums."""
        clipped = norm(learner, learner.gradients())
        scale = grad_norm / clipped if clipped > 0 else 1.0
        self._squares.append(grad_norm**2)
        self._in_group += 1
        fresh = self._in_group == 1
        if self._total is None:
            self._total = [torch.zeros_like(gradient) for gradient in learner.gradients()]
        if self._group is None:
            self._group = [torch.zeros_like(gradient) for gradient in learner.gradients()]
        for total, group, gradient in zip(self._total, self._group, learner.gradients(), strict=True):
            total.add_(gradient, alpha=scale)
            if fresh:
                group.zero_()
            group.add_(gradient)

    def _take_step(self, learner: RuleLearner) -> None:
        assert self._group is not None, "a part was collected"
        for gradient, group in zip(learner.gradients(), self._group, strict=True):
            gradient.copy_(group).div_(self._in_group)
        share = self._in_group / (self._in_group + self.scale) if self.settings.shrink else 1.0
        if share < 1.0:
            self._theta0 = snapshot(learner.parameters(), self._theta0)
        learner.optimizer_step()
        if share < 1.0 and self._theta0 is not None:
            reposition(learner.parameters(), self._theta0, share)
            learner.publish()
        self._in_group = 0

    @property
    def scale(self) -> float:
        """B, in parts; 0 before the first measurement."""
        return self.noise / self.signal if self.signal > 0 else (math.inf if self.noise > 0 else 0.0)

    def _measure(self, learner: RuleLearner) -> dict[str, float]:
        count = len(self._squares)
        metrics = {"split/parts_per_step": float(self.parts_per_step)}
        if count < 2 or self._total is None:
            return metrics
        mean_square = sum(self._squares) / count
        square_of_mean = (norm(learner, self._total) / count) ** 2
        kept = self.settings.decay if self.signal or self.noise else 0.0
        self.signal = kept * self.signal + (1 - kept) * (count * square_of_mean - mean_square) / (count - 1)
        self.noise = kept * self.noise + (1 - kept) * (mean_square - square_of_mean) * count / (count - 1)
        self.signal = max(self.signal, 0.0)
        self.parts_per_step = count if self.scale >= count else max(1, math.ceil(self.scale))
        return metrics | {"split/noise_scale_parts": min(self.scale, 1e6)}

    def state_dict(self) -> dict[str, Any]:
        return {"signal": self.signal, "noise": self.noise, "parts_per_step": self.parts_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.signal, self.noise = state["signal"], state["noise"]
        self.parts_per_step = state["parts_per_step"]


class SplitProbeRule(RuleSettings):
    """Half a batch looks ahead, the other half corrects: look-ahead for one pass."""

    label: ClassVar[str] = "Split-probe replay"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "studies.candidates:SplitProbe"
    symbols: ClassVar[dict[str, str]] = {"k": "K", "alpha": "α"}
    label_settings: ClassVar[tuple[str, ...]] = ("k",)

    name: Literal["split-probe"] = "split-probe"
    k: int = Field(3, ge=1, le=1000, description="K: steps on the first half's gradient.")
    alpha: float = Field(1.0, ge=0, le=1, description="α: share of the way to the look-ahead point.")

    def shard_buffers(self, num_moments: int) -> int:
        """θ⁰; the moments are copied in chunks."""
        return 1


class SplitProbe(Stateless):
    """With two mini-batches A and B:

        θ¹ = OptimStep(θ⁰, g_A(θ⁰)), then K − 1 steps of the optimizer's recurrence on the same gradient, with copies of
        its moments, to θᴷ;   θ̃ = θ⁰ + α(θᴷ − θ⁰);   θ ← OptimStep(θ̃, g_B(θ̃))

    The noises of the two gradients are independent, unlike those of GXPO's probes and corrective pass. With an odd
    number of mini-batches the last one is a plain step.
    """

    name: ClassVar[str] = "split-probe"

    def __init__(self, settings: SplitProbeRule | None = None) -> None:
        self.settings = settings or SplitProbeRule()
        self._probe = True

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See contract.Rule."""
        first = learner.backward()
        probe, self._probe = self._probe and not last, last or not self._probe
        if not (probe and first.finite):
            return finish_plain_step(learner, first)
        theta0 = snapshot(learner.parameters(), None)
        report = finish_plain_step(learner, first)
        recurrence, state = learner.recurrence(), learner.optimizer_state()
        moments = [state.moments()[name] for name in recurrence.moment_names]
        for theta, gradient, *own in chunks(learner.parameters(), learner.gradients(), *moments):
            copies = [moment.clone() for moment in own]
            for n in range(1, self.settings.k):
                recurrence(theta, copies, gradient, state.step + n)
        reposition(learner.parameters(), theta0, self.settings.alpha)
        learner.publish()
        return report


class OuterNesterovRule(RuleSettings):
    """Nesterov's momentum over windows of training steps."""

    label: ClassVar[str] = "Outer Nesterov"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "studies.candidates:OuterNesterov"

    name: Literal["outer-nesterov"] = "outer-nesterov"
    window: int = Field(4, ge=1, le=1000, description="Optimizer steps to an outer step.")
    momentum: float = Field(0.5, ge=0, lt=1, description="μ of the outer steps.")

    def shard_buffers(self, num_moments: int) -> int:
        """The anchor and the outer momentum."""
        return 2


class OuterNesterov:
    """Plain steps; after each window, with Δ = θ − anchor (DiLoCo's outer step, arXiv 2311.08105, with rate 1):

        v ← μv + Δ,   θ ← anchor + Δ + μv,   anchor ← θ

    A pilot: checkpoints do not hold anchor and momentum, so a continued run starts both from zero.
    """

    name: ClassVar[str] = "outer-nesterov"

    def __init__(self, settings: OuterNesterovRule | None = None) -> None:
        self.settings = settings or OuterNesterovRule()
        self._taken = 0
        self._anchor: list[Tensor] | None = None
        self._momentum: list[Tensor] | None = None

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See contract.Rule."""
        if self._anchor is None or self._momentum is None:
            self._anchor = snapshot(learner.parameters(), None)
            self._momentum = [torch.zeros_like(theta) for theta in self._anchor]
        report = finish_plain_step(learner, learner.backward())
        self._taken += report.finite
        if report.finite and self._taken % self.settings.window == 0:
            for theta, anchor, momentum in chunks(learner.parameters(), self._anchor, self._momentum):
                momentum.mul_(self.settings.momentum).add_(theta - anchor)
                theta.add_(momentum, alpha=self.settings.momentum)
                anchor.copy_(theta)
            learner.publish()
        return report

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


class SurprisalSettings(LossSettings):
    """GRPO's clipped ratio on the most surprising tokens alone."""

    implementation: ClassVar[str] = "studies.candidates:SurprisalLoss"
    scales_with_advantage: ClassVar[bool] = True

    surrogate: Literal["surprisal"] = "surprisal"
    share: float = Field(0.2, gt=0, le=1, description="Of a micro-batch's tokens, those of the lowest probability.")


class SurprisalLoss:
    """The tokens at which the policy hesitates carry most of what reasoning learns (Wang et al. 2025, arXiv 2506.01939,
    which takes the fifth of highest entropy). Here by the sampled token's −log π, which the loss has without a pass
    over the vocabulary; their terms are divided by their share, so that a step keeps its length."""

    def __init__(self, settings: SurprisalSettings | None = None) -> None:
        self.settings = settings or SurprisalSettings()

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """See algo.losses.Surrogate."""
        ratio = log_ratio.exp()
        advantages = micro.advantages
        clipped = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        surprisal = -logprobs.detach()
        chosen = surprisal >= torch.quantile(surprisal, 1 - self.settings.share)
        return ratio, loss * chosen / self.settings.share
