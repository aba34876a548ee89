"""GRPO (Shao et al. 2024, arXiv 2402.03300): θ ← OptimStep(θ, g(θ)), one backward pass per batch.

The loss and the advantages are in `algo`; as an update rule GRPO is a plain optimizer step.
"""

from __future__ import annotations

from typing import ClassVar

from gxpo_trainer.config import GrpoRule
from gxpo_trainer.rules.contract import RuleLearner, Stateless, finish_plain_step
from gxpo_trainer.types import StepReport


class GRPO(Stateless):
    """One backward pass, one optimizer step."""

    name: ClassVar[str] = "grpo"

    def __init__(self, settings: GrpoRule | None = None) -> None:
        self.settings = settings or GrpoRule()

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        return finish_plain_step(learner, learner.backward())
