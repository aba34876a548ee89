"""SFPO, Slow-Fast Policy Optimization (arXiv 2510.04072): K + 1 backward passes per batch.

    θ⁰ → K optimizer steps on the same batch → θᴷ         (fast)
    θ̃ = θ⁰ + α(θᴷ − θ⁰)                                   (reposition)
    θ ← OptimStep(θ̃, g(θ̃))                                (slow)

Differs from the paper: a gate that fires takes effect in the same step, because the entropy is known after the first
pass, and with α = 0 no other pass is needed. With several mini-batches their mean entropy is known after
the first pass over the last one, and the gate takes effect there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from gxpo_trainer.config import SfpoRule
from gxpo_trainer.rules import diagnostics
from gxpo_trainer.rules.contract import (
    BackwardResult,
    Passes,
    RuleLearner,
    finish_passes,
    finish_plain_step,
    reposition,
    snapshot,
)
from gxpo_trainer.rules.gate import GatedLookAhead
from gxpo_trainer.types import Metrics, StepReport


class SFPO(GatedLookAhead):
    """K fast steps, one reposition, one slow step, until the entropy's z-score fires the gate."""

    name: ClassVar[str] = "sfpo"

    def __init__(self, settings: SfpoRule | None = None) -> None:
        self.settings = settings or SfpoRule()
        super().__init__(self.settings.k, self.settings.gate)
        self._theta0: list[Tensor] | None = None
        self.trajectory: list[Tensor] | None = None

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        if self.gate.active:
            self._theta0 = snapshot(learner.parameters(), self._theta0)
        first = learner.backward()
        entropy = first.statistics.get("entropy")
        if entropy is not None and first.finite:
            self.gate.collect(entropy)
        reading = None
        if last:
            self.num_steps += 1
            reading = self.gate.judge(self.num_steps)
        if self.gate.active and self._theta0 is not None and first.finite:
            report = self._look_ahead(learner, first, self._theta0)
        else:
            report = finish_plain_step(learner, first)
        self.trajectory = None
        if not self.gate.active:
            self.release_buffers()
        if last:
            report.metrics.update(self.gate.metrics(reading))
        return report

    def release_buffers(self) -> None:
        self._theta0 = None

    def activity_threshold(self, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
        return 0.0

    def _look_ahead(self, learner: RuleLearner, first: BackwardResult, theta0: list[Tensor]) -> StepReport:
        k, alpha = self.settings.k, self.settings.alpha
        passes = [first]
        learner.optimizer_step()
        for taken in range(1, k):
            passes.append(learner.backward())
            if not passes[-1].finite:
                # The mean of the fast steps taken so far: θ¹ when only one was.
                return self._fall_back(learner, passes, theta0, 1 / taken)
            learner.optimizer_step()
        extra: Metrics = {}
        if self.trajectory is not None:
            extra = diagnostics.prediction_error(learner, self.trajectory, learner.parameters(), theta0)
        reposition(learner.parameters(), theta0, alpha)
        if self.trajectory is not None:
            extra |= diagnostics.reposition_error(learner, self.trajectory, learner.parameters(), theta0, alpha)
        learner.publish()
        passes.append(learner.backward())
        if not passes[-1].finite:
            return self._fall_back(learner, passes, theta0, 1 / (alpha * k) if alpha else 0.0)
        learner.optimizer_step()
        return self._report(learner, passes, theta0, extra)

    def _fall_back(self, learner: RuleLearner, passes: Passes, theta0: list[Tensor], share: float) -> StepReport:
        reposition(learner.parameters(), theta0, share)
        learner.publish()
        return self._report(learner, passes, theta0, {})

    def _report(self, learner: RuleLearner, passes: Passes, theta0: list[Tensor], metrics: Metrics) -> StepReport:
        if passes[1].finite:
            metrics["grad/norm_g1"] = passes[1].grad_norm
        if len(passes) == self.settings.k + 1 and passes[-1].finite:
            metrics["grad/norm_slow"] = passes[-1].grad_norm
        return finish_passes(learner, passes, theta0, metrics)
