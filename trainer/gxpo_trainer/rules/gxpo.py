"""GXPO, Gradient Extrapolation-Based Policy Optimization (arXiv 2605.06755), algorithm 1.

    g⁰ = g(θ⁰), θ¹ = OptimStep(θ⁰, g⁰)                      first probe
    g¹ = g(θ¹), θ² = OptimStep(θ¹, g¹)                      second probe
    θᴷ from the probes (predictors.py), θ̃ = θ⁰ + α(θᴷ − θ⁰)
    θ ← OptimStep(θ̃, g_slow), g_slow = g(θ̃)                 corrective step
    z-score of ‖g_slow‖ over its window reaches τ: plain GRPO from the next step on

Three backward passes whatever K; one after the gate has fired. Differs from the paper: r and the scale are
clamped as its authors' code does; two more predictors (`displacement`, `replay`), a single probe, and two
more optimizer states before the corrective step; a gradient that is not finite ends the step at θ¹; the gate
ignores a norm of 0.

Buffers in addition to parameters, gradient and optimizer state: θ⁰ and g⁰ (`gradient`, `replay`), θ⁰ and θ¹
(`displacement`), θ⁰ (one probe); `rollback` adds copies of the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.rules import diagnostics
from gxpo_trainer.rules.contract import (
    Passes,
    RuleLearner,
    chunks,
    cosine,
    finish_passes,
    finish_plain_step,
    snapshot,
)
from gxpo_trainer.rules.gate import GatedLookAhead
from gxpo_trainer.rules.predictors import PREDICTORS, Buffers, activity_threshold
from gxpo_trainer.types import Metrics, StepReport


class GXPO(GatedLookAhead):
    """Two probes, K virtual steps, one true gradient."""

    name: ClassVar[str] = "gxpo"

    def __init__(self, settings: GxpoRule | None = None) -> None:
        self.settings = settings or GxpoRule()
        super().__init__(self.settings.k, self.settings.gate)
        self.predictor = PREDICTORS[self.settings.predictor](self.settings)
        self.buffers = Buffers()
        self.trajectory: list[Tensor] | None = None

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        if self.gate.active:
            report = self._look_ahead(learner)
            self.trajectory = None
        else:
            self.release_buffers()
            first = learner.backward()
            report = finish_plain_step(learner, first)
            self._collect(first.grad_norm)
        if last:
            self.num_steps += 1
            report.metrics.update(self.gate.metrics(self.gate.judge(self.num_steps)))
        return report

    def release_buffers(self) -> None:
        self.buffers = Buffers()

    def activity_threshold(self, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
        return activity_threshold(self.settings, learner, gradients)

    def _look_ahead(self, learner: RuleLearner) -> StepReport:
        predictor = self.predictor
        theta0 = self.buffers.theta0 = snapshot(learner.parameters(), self.buffers.theta0)
        passes = [learner.backward()]
        if not passes[0].finite:
            return finish_plain_step(learner, passes[0])
        if self.settings.probe_state == "rollback":
            held = self.buffers.moments
            moments = learner.optimizer_state().moments()
            self.buffers.moments = {name: snapshot(shards, held.get(name)) for name, shards in moments.items()}
        if predictor.holds_gradient:
            self.buffers.probe = snapshot(learner.gradients(), self.buffers.probe)
        learner.optimizer_step()
        if predictor.holds_point:
            self.buffers.probe = snapshot(learner.parameters(), self.buffers.probe)
        if self.settings.probes == 2:
            passes.append(learner.backward())
            if not passes[-1].finite:  # the live parameters are θ¹ already
                return self._report(learner, passes, theta0, {})
            learner.optimizer_step()
        metrics = self._extrapolate(learner, theta0)
        learner.publish()
        passes.append(learner.backward())
        if not passes[-1].finite:
            repeated = self._return_to_first_probe(learner, theta0)
            report = self._report(learner, passes, theta0, metrics)
            return replace(report, backward_passes=len(passes) + repeated)
        if predictor.holds_gradient:
            cos = cosine(learner, self.buffers.probe, learner.gradients())
            if cos is not None:
                metrics["grad/cos_g0_slow"] = cos
        learner.optimizer_step()
        return self._report(learner, passes, theta0, metrics)

    def _extrapolate(self, learner: RuleLearner, theta0: list[Tensor]) -> Metrics:
        """θ² (θ¹ with one probe) becomes θ̃, in one pass; the optimizer's state as `probe_state` says."""
        metrics: Metrics = {}
        live, predictor = learner.parameters(), self.predictor
        if self.trajectory is not None:
            theta_k = [tensor.clone() for tensor in live]
            predictor.extrapolate(learner, self.buffers, theta_k, trial=True)
            metrics.update(diagnostics.prediction_error(learner, self.trajectory, theta_k, theta0))
            del theta_k
        sums = predictor.extrapolate(learner, self.buffers, live, trial=False)
        if self.trajectory is not None:
            alpha = self.settings.alpha
            metrics.update(diagnostics.reposition_error(learner, self.trajectory, live, theta0, alpha))
        state = learner.optimizer_state()
        if self.settings.probe_state == "rollback":
            for name, shards in state.moments().items():
                snapshot(self.buffers.moments[name], shards)
            state.set_step(state.step - self.settings.probes)
        elif self.settings.probe_state == "fast_forward":
            state.set_step(state.step + self.settings.k - self.settings.probes)
        return metrics | predictor.metrics(sums)

    def _return_to_first_probe(self, learner: RuleLearner, theta0: list[Tensor]) -> int:
        """After a corrective gradient that is not finite: θ¹, the plain GRPO step; the passes that this took.

        `displacement` holds θ¹. `rollback` holds the state that led to it, so the step is repeated; with `displacement`
        by a pass of its own, because g⁰ is not held. The others use the optimizer's step from θ⁰ with the moments after
        the probes; with one probe, and for plain gradient descent, that is θ¹ itself. Where nothing of the first probe
        is left (one probe without moments, or rolled back) the step is skipped.
        """
        live = learner.parameters()
        g0 = self.buffers.probe
        rolled_back = self.settings.probe_state == "rollback"
        if self.predictor.holds_point:
            snapshot(theta0 if rolled_back else g0, live)
            learner.publish()
            if rolled_back and learner.backward().finite:
                learner.optimizer_step()
            return int(rolled_back)
        recurrence, state = learner.recurrence(), learner.optimizer_state()
        moments = [state.moments()[name] for name in recurrence.moment_names]
        snapshot(theta0, live)
        if rolled_back and g0:
            for theta, gradient, *parts in chunks(live, g0, *moments):
                recurrence(theta, parts, gradient, state.step + 1)
            state.set_step(state.step + 1)
        elif g0 or (moments and not rolled_back):
            for theta, gradient, *parts in chunks(live, g0 or live, *moments):
                theta.add_(recurrence.displacement(theta, parts, gradient, state.step))
        learner.publish()
        return 0

    def _report(self, learner: RuleLearner, passes: Passes, theta0: list[Tensor], metrics: Metrics) -> StepReport:
        if self.settings.probes == 2 and passes[1].finite:
            metrics["grad/norm_g1"] = passes[1].grad_norm
        if passes[-1].finite:
            metrics["grad/norm_slow"] = passes[-1].grad_norm
            self._collect(passes[-1].grad_norm)
        return finish_passes(learner, passes, theta0, metrics)

    def _collect(self, norm: float) -> None:
        """Pass a norm to the gate, except the 0 of a batch without a signal, against which any other is an alarm."""
        if norm > 0:
            self.gate.collect(norm)
