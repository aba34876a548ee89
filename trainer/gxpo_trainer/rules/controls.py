"""Controls: rules that tell what a look-ahead adds.

Epochs, K plain optimizer steps on one batch, K backward passes:

    θⁿ⁺¹ = OptimStep(θⁿ, g(θⁿ)), n = 0 … K − 1,   θ ← θᴷ

The point that SFPO and GXPO look ahead to, taken for real and without a corrective step: a control that separates the
look-ahead from the additional updates. PPO (Schulman et al. 2017, arXiv 1707.06347) calls its repetitions epochs as
well. Differs from it: each epoch is one full-batch step.

Extragradient (Korpelevich 1976), 2 backward passes a batch:

    θ¹ = OptimStep(θ⁰, g(θ⁰))                            probe
    θ̃ = θ⁰ + α(θ¹ − θ⁰)
    θ ← OptimStep(θ⁰, g(θ̃))                              from θ⁰, with the optimizer's state of θ⁰

Unlike a look-ahead with reposition, the parameters move by one optimizer step only: the probe decides where the
gradient is taken and is undone. α = 1 is the extragradient method, α = ½ the midpoint method.

Differs from Korpelevich: the step is the base optimizer's, AdamW included, and the optimizer does not see the probe.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gxpo_trainer.config import EpochsRule, ExtragradientRule
from gxpo_trainer.rules.contract import (
    RuleLearner,
    Stateless,
    cosine,
    finish_passes,
    finish_plain_step,
    reposition,
    snapshot,
)
from gxpo_trainer.types import StepReport


class Epochs(Stateless):
    """K backward passes, K optimizer steps."""

    name: ClassVar[str] = "epochs"

    def __init__(self, settings: EpochsRule | None = None) -> None:
        self.settings = settings or EpochsRule()

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See contract.Rule. A later gradient that is not finite ends the step at the point reached."""
        passes = [learner.backward()]
        if not passes[0].finite:
            return finish_plain_step(learner, passes[0])
        theta0 = snapshot(learner.parameters())
        learner.optimizer_step()
        while len(passes) < self.settings.k and passes[-1].finite:
            passes.append(learner.backward())
            if passes[-1].finite:
                learner.optimizer_step()
        metrics = {"grad/norm_g1": passes[1].grad_norm} if passes[1].finite else {}
        return finish_passes(learner, passes, theta0, metrics)


class Extragradient(Stateless):
    """A probe, and one optimizer step from θ⁰ on the probe's gradient."""

    name: ClassVar[str] = "extragradient"

    def __init__(self, settings: ExtragradientRule | None = None) -> None:
        self.settings = settings or ExtragradientRule()
        self._theta0: list[Tensor] | None = None
        self._moments: dict[str, list[Tensor]] = {}

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """See contract.Rule. A second gradient that is not finite leaves θ¹, the plain step."""
        theta0 = self._theta0 = snapshot(learner.parameters(), self._theta0)
        passes = [learner.backward()]
        if not passes[0].finite:
            return finish_plain_step(learner, passes[0])
        state = learner.optimizer_state()
        self._moments = {name: snapshot(held, self._moments.get(name)) for name, held in state.moments().items()}
        g0 = [gradient.clone() for gradient in learner.gradients()]
        learner.optimizer_step()
        if self.settings.alpha != 1.0:
            reposition(learner.parameters(), theta0, self.settings.alpha)
            learner.publish()
        passes.append(learner.backward())
        if not passes[-1].finite:
            reposition(learner.parameters(), theta0, 1 / self.settings.alpha)
            learner.publish()
            return finish_passes(learner, passes, theta0, {})
        metrics = {"grad/norm_slow": passes[-1].grad_norm}
        if (cos := cosine(learner, g0, learner.gradients())) is not None:
            metrics["grad/cos_g0_slow"] = cos
        snapshot(theta0, learner.parameters())
        for name, held in state.moments().items():
            snapshot(self._moments[name], held)
        state.set_step(state.step - 1)
        learner.optimizer_step()
        return finish_passes(learner, passes, theta0, metrics)

    def release_buffers(self) -> None:
        self._theta0, self._moments = None, {}
