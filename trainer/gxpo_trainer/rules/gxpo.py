"""GXPO, Gradient Extrapolation-Based Policy Optimization (arXiv 2605.06755), algorithm 1.

    g⁰ = g(θ⁰), θ¹ = OptimStep(θ⁰, g⁰)                      first probe
    g¹ = g(θ¹), θ² = OptimStep(θ¹, g¹)                      second probe
    θᴷ from the probes (extrapolation.py), θ̃ = θ⁰ + α(θᴷ − θ⁰)
    θ ← OptimStep(θ̃, g_slow), g_slow = g(θ̃)                 corrective step
    z-score of ‖g_slow‖ over its window reaches τ: plain GRPO from the next step on

Three backward passes whatever K; one after the gate has fired. Differs from the paper: r and the scale are
clamped as its authors' code does; two more predictors (`displacement`, `replay`), a single probe, and two
more optimizer states before the corrective step; a gradient that is not finite ends the step at θ¹.

Buffers in addition to parameters, gradient and optimizer state: θ⁰ and g⁰ (`gradient`, `replay`), θ⁰ and θ¹
(`displacement`), θ⁰ (one probe); `rollback` adds copies of the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.rules import diagnostics
from gxpo_trainer.rules.contract import (
    BackwardResult,
    RuleLearner,
    Trajectory,
    chunks,
    cosine,
    distance,
    finish_plain_step,
    policy_metrics,
    rms,
    snapshot,
)
from gxpo_trainer.rules.gate import GatedLookAhead
from gxpo_trainer.rules.predictors import (
    Plan,
    extrapolate_by_displacement,
    extrapolate_by_gradient,
    extrapolate_by_replay,
    extrapolation_metrics,
    replay_constant_gradient,
    run_over_shards,
)
from gxpo_trainer.types import Metrics, StepReport


@dataclass
class Buffers:
    """Shard-sized copies, overwritten by every step while the gate is active; kept only to save the allocation."""

    theta0: list[Tensor] | None = None
    probe: list[Tensor] | None = None
    """g⁰, or θ¹ for the predictor `displacement`."""
    moments: dict[str, list[Tensor]] | None = None

    def count(self) -> int:
        """Shard-sized buffers held."""
        return sum(x is not None for x in (self.theta0, self.probe)) + len(self.moments or {})


class GXPO(GatedLookAhead):
    """Two probes, K virtual steps, one true gradient."""

    name: ClassVar[str] = "gxpo"

    def __init__(self, settings: GxpoRule | None = None) -> None:
        self.settings = settings or GxpoRule()
        super().__init__(self.settings.k, self.settings.gate)
        self.buffers = Buffers()
        self.trajectory: Trajectory | None = None

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See rules.base.Rule."""
        if self.gate.active:
            report = self._look_ahead(learner)
            self.trajectory = None
        else:
            self.release_buffers()
            first = learner.backward()
            report = finish_plain_step(learner, first)
            self.gate.collect(first.grad_norm)
        if last:
            self.num_steps += 1
            report.metrics.update(self.gate.metrics(self.gate.judge(self.num_steps)))
        return report

    def release_buffers(self) -> None:
        """See rules.base.BufferingRule."""
        self.buffers = Buffers()

    def activity_threshold(self, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
        """See rules.base.LookAheadRule."""
        if self.settings.activity == "delta":
            return self.settings.delta
        return self.settings.activity_rms * rms(learner, gradients)

    def predictor_for(self, learner: RuleLearner) -> str:
        """The configured predictor; `displacement` where the optimizer has no element-wise recurrence."""
        wanted = self.settings.predictor
        return "displacement" if wanted == "replay" and learner.recurrence() is None else wanted

    def _look_ahead(self, learner: RuleLearner) -> StepReport:
        predictor = self.predictor_for(learner)
        probes = self.settings.probes if predictor == "replay" else 2
        theta0 = self.buffers.theta0 = snapshot(learner.parameters(), self.buffers.theta0)
        passes = [learner.backward()]
        if not passes[0].finite:
            return finish_plain_step(learner, passes[0])
        if self.settings.probe_state == "rollback":
            self._save_moments(learner)
        if predictor != "displacement" and probes == 2:
            self.buffers.probe = snapshot(learner.gradients(), self.buffers.probe)
        learner.optimizer_step()
        if predictor == "displacement":
            self.buffers.probe = snapshot(learner.parameters(), self.buffers.probe)
        if probes == 2:
            passes.append(learner.backward())
            if not passes[-1].finite:  # the live parameters are θ¹ already
                return self._report(learner, passes, theta0, {}, fallback=True)
            learner.optimizer_step()
        metrics = self._extrapolate(learner, predictor, probes, theta0)
        learner.publish()
        passes.append(learner.backward())
        if not passes[-1].finite:
            self._return_to_first_probe(learner, predictor, theta0)
            return self._report(learner, passes, theta0, metrics, fallback=True)
        if predictor != "displacement" and probes == 2 and self.buffers.probe is not None:
            cos = cosine(learner, self.buffers.probe, learner.gradients())
            if cos is not None:
                metrics["grad/cos_g0_slow"] = cos
        learner.optimizer_step()
        return self._report(learner, passes, theta0, metrics, fallback=False)

    def _extrapolate(self, learner: RuleLearner, predictor: str, probes: int, theta0: list[Tensor]) -> Metrics:
        """θ² (θ¹ with one probe) becomes θ̃, in one pass; the optimizer's state as `probe_state` says."""
        metrics: Metrics = {}
        if self.trajectory is not None:
            theta_k = [tensor.clone() for tensor in learner.parameters()]
            self._fused_pass(learner, predictor, probes, theta_k, theta0, alpha=1.0, keep_moments=False)
            metrics.update(diagnostics.prediction_error(learner, self.trajectory, theta_k, theta0))
            del theta_k
        keep_moments = self.settings.probe_state == "fast_forward" and predictor == "replay"
        sums = self._fused_pass(learner, predictor, probes, learner.parameters(), theta0, None, keep_moments)
        if self.trajectory is not None:
            alpha = self.settings.alpha
            live = learner.parameters()
            metrics.update(diagnostics.reposition_error(learner, self.trajectory, live, theta0, alpha))
        state = learner.optimizer_state()
        if keep_moments:
            state.set_step(state.step + self.settings.k - probes)
        elif self.settings.probe_state == "rollback":
            self._restore_moments(learner, state.step - probes)
        metrics.update(extrapolation_metrics(sums, predictor, probes))
        return metrics

    def _fused_pass(
        self,
        learner: RuleLearner,
        predictor: str,
        probes: int,
        theta: Sequence[Tensor],
        theta0: list[Tensor],
        alpha: float | None,
        keep_moments: bool,
    ) -> dict[str, float]:
        gradients = learner.gradients()
        g0 = gradients if probes == 1 else _required(self.buffers.probe)
        if predictor == "displacement":
            return self._extrapolate_displacement(learner, theta, theta0, alpha)
        plan = self._plan(theta, alpha, self.activity_threshold(learner, g0))
        if predictor == "replay":
            recurrence = _required(learner.recurrence())
            state = learner.optimizer_state()
            moments = [state.moments()[name] for name in recurrence.moment_names]
            settings = [plan, recurrence, state.step, keep_moments]
            if probes == 1:
                return run_over_shards(
                    learner, replay_constant_gradient, settings, [theta, theta0, gradients, *moments]
                )
            return run_over_shards(learner, extrapolate_by_replay, settings, [theta, theta0, g0, gradients, *moments])
        return run_over_shards(learner, extrapolate_by_gradient, [plan], [theta, theta0, g0, gradients])

    def _extrapolate_displacement(
        self, learner: RuleLearner, theta: Sequence[Tensor], theta0: list[Tensor], alpha: float | None
    ) -> dict[str, float]:
        """A step carries the learning rate: |d⁰| > ηδ, which for plain gradient descent is the paper's |g⁰| > δ."""
        recurrence = learner.recurrence()
        rate, decay = (recurrence.learning_rate, recurrence.weight_decay) if recurrence else (1.0, 0.0)
        kept = 1 - rate * decay
        theta1 = _required(self.buffers.probe)
        threshold = rate * self.settings.delta
        if self.settings.activity == "rms":
            threshold = self.settings.activity_rms * rms(learner, theta1, theta0, kept)
        plan = self._plan(theta, alpha, threshold)
        return run_over_shards(learner, extrapolate_by_displacement, [plan, kept], [theta, theta0, theta1])

    def _plan(self, theta: Sequence[Tensor], alpha: float | None, threshold: float) -> Plan:
        varies = self.settings.activity == "rms"
        bound = torch.tensor(threshold, device=theta[0].device) if varies else threshold
        return Plan.of(self.settings, alpha, bound)

    def _return_to_first_probe(self, learner: RuleLearner, predictor: str, theta0: list[Tensor]) -> None:
        """After a corrective gradient that is not finite: θ¹, the plain GRPO step.

        `displacement` holds θ¹. `rollback` holds the state that led to it, so the step is repeated. The
        others hold neither (that would take another shard) and use the optimizer's step from θ⁰ with the moments
        after the probes instead; with one probe, and for plain gradient descent, that is θ¹ itself. Where
        nothing of the first probe is left (one probe without moments, or rolled back) the step is skipped.
        """
        live = learner.parameters()
        g0 = self.buffers.probe
        if predictor == "displacement":
            snapshot(_required(g0), live)
            learner.publish()
            return
        recurrence = _required(learner.recurrence())
        state = learner.optimizer_state()
        moments = [state.moments()[name] for name in recurrence.moment_names]
        rolled_back = self.settings.probe_state == "rollback"
        snapshot(theta0, live)
        if rolled_back and g0 is not None:
            for theta, gradient, *parts in chunks(live, g0, *moments):
                recurrence(theta, parts, gradient, state.step + 1)
            state.set_step(state.step + 1)
        elif g0 is not None or (moments and not rolled_back):
            for theta, gradient, *parts in chunks(live, g0 or live, *moments):
                theta.add_(recurrence.displacement(theta, parts, gradient, state.step))
        learner.publish()

    def _report(
        self,
        learner: RuleLearner,
        passes: list[BackwardResult],
        theta0: list[Tensor],
        extra: Metrics,
        *,
        fallback: bool,
    ) -> StepReport:
        metrics: Metrics = {"grad/norm_g0": passes[0].grad_norm, **extra, **policy_metrics(passes)}
        if self.settings.probes == 2 and len(passes) > 1:
            metrics["grad/norm_g1"] = passes[1].grad_norm
        if not fallback:
            metrics["grad/norm_slow"] = passes[-1].grad_norm
            self.gate.collect(passes[-1].grad_norm)
        metrics["update/norm"] = distance(learner, learner.parameters(), theta0)
        why = f"the gradient of pass {len(passes)} is not finite" if fallback else None
        return StepReport(metrics, backward_passes=len(passes), fallback=why)

    def _save_moments(self, learner: RuleLearner) -> None:
        held = self.buffers.moments or {}
        moments = learner.optimizer_state().moments()
        self.buffers.moments = {name: snapshot(shards, held.get(name)) for name, shards in moments.items()}

    def _restore_moments(self, learner: RuleLearner, step: int) -> None:
        state = learner.optimizer_state()
        for name, shards in state.moments().items():
            snapshot(_required(self.buffers.moments)[name], shards)
        state.set_step(step)


def _required(value: Any) -> Any:
    """A value that the step's own order guarantees."""
    assert value is not None
    return value
