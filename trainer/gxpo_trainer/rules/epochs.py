"""Several epochs on one batch: K plain optimizer steps, θᴷ kept; K backward passes a batch.

    θⁿ⁺¹ = OptimStep(θⁿ, g(θⁿ)), n = 0 … K − 1,   θ ← θᴷ

The point that SFPO and GXPO look ahead to, taken for real and without a corrective step: a control that separates the
look-ahead from the additional updates. PPO (Schulman et al. 2017, arXiv 1707.06347) calls its repetitions epochs as
well. Differs from it: each epoch is one full-batch step.
"""

from __future__ import annotations

from typing import ClassVar

from gxpo_trainer.config import EpochsRule
from gxpo_trainer.rules.base import RuleLearner
from gxpo_trainer.rules.plain import distance, finish_plain_step, policy_metrics, snapshot
from gxpo_trainer.rules.stateless import Stateless
from gxpo_trainer.types import StepReport


class Epochs(Stateless):
    """K backward passes, K optimizer steps."""

    name: ClassVar[str] = "epochs"

    def __init__(self, settings: EpochsRule | None = None) -> None:
        self.settings = settings or EpochsRule()

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See rules.base.Rule. A later gradient that is not finite ends the step at the point reached."""
        passes = [learner.backward()]
        if not passes[0].finite:
            return finish_plain_step(learner, passes[0])
        theta0 = snapshot(learner.parameters(), None)
        learner.optimizer_step()
        while len(passes) < self.settings.k and passes[-1].finite:
            passes.append(learner.backward())
            if passes[-1].finite:
                learner.optimizer_step()
        metrics = {
            "grad/norm_g0": passes[0].grad_norm,
            "grad/norm_g1": passes[1].grad_norm,
            "update/norm": distance(learner, learner.parameters(), theta0),
            **policy_metrics(passes),
        }
        why = None if passes[-1].finite else f"the gradient of pass {len(passes)} is not finite"
        return StepReport(metrics, backward_passes=len(passes), fallback=why)
