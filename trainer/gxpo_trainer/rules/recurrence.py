"""The base optimizers as pure element-wise functions of (θ, state, g, n).

They repeat the arithmetic of torch.optim.AdamW and torch.optim.SGD on any slice of a shard, so that the
`replay` predictor can run the optimizer ahead on virtual gradients without touching its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamWRecurrence:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with decoupled weight decay."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __call__(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> None:
        """One step in place; see contract.Recurrence."""
        first, second = moments
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        theta.add_(self.displacement(theta, moments, gradient, step))

    def displacement(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> Tensor:
        """What step number `step` adds to the theta before it, given the moments after it."""
        first, second = moments
        denominator = second.sqrt().div_(math.sqrt(1 - self.beta2**step)).add_(self.epsilon)
        change = first.div(denominator).mul_(-self.learning_rate / (1 - self.beta1**step))
        if self.weight_decay:
            change.add_(theta, alpha=-self.learning_rate * self.weight_decay)
        return change


@dataclass(frozen=True, slots=True)
class SGDRecurrence:
    """Gradient descent with optional (heavy-ball) momentum and weight decay added to the gradient."""

    learning_rate: float
    momentum: float
    weight_decay: float

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def __call__(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> None:
        """One step in place; see contract.Recurrence."""
        if self.momentum:
            moments[0].mul_(self.momentum).add_(gradient)
            if self.weight_decay:
                moments[0].add_(theta, alpha=self.weight_decay)
        theta.add_(self.displacement(theta, moments, gradient, step))

    def displacement(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> Tensor:
        """What step number `step` adds to the theta before it, given the moments after it."""
        if self.momentum:
            return moments[0].mul(-self.learning_rate)
        change = gradient.mul(-self.learning_rate)
        if self.weight_decay:
            change.add_(theta, alpha=-self.learning_rate * self.weight_decay)
        return change
