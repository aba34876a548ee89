"""A visible, reproducible change of all weights that can be undone bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.rules.plain import snapshot, sum_over

PIECE = 1 << 20
"""Elements of noise that are drawn at a time."""


class Perturbation:
    """Holds the weights as they are at construction. Order: `apply`, as often as needed, then `undo`.

    The noise is normal, `scale` times the mean absolute weight of the whole model: a LoRA factor that starts at zero
    is moved as well.
    """

    def __init__(self, learner: DeepSpeedLearner) -> None:
        self._learner = learner
        self.before = snapshot(learner.parameters(), None)
        """The held weights, which leave the device with the learner's own memory."""
        total, count = sum_over(learner, _absolute_sum, self.before)
        self._magnitude = total / count

    @torch.no_grad()
    def apply(self, scale: float, seed: int) -> None:
        """The held weights plus noise, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        # Copies of one shard must stay copies.
        owner = 0 if self._learner.replicated else self._learner.rank
        for index, shard in enumerate(self._learner.parameters()):
            generator = torch.Generator(device=shard.device).manual_seed(seed + 1000 * owner + index)
            for piece in shard.split(PIECE):
                noise = torch.randn(piece.shape, generator=generator, device=piece.device, dtype=piece.dtype)
                piece.add_(noise, alpha=scale * self._magnitude)
        self._learner.publish()

    def undo(self) -> None:
        """The held weights, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        self._learner.publish()


def _absolute_sum(part: Tensor) -> Tensor:
    count = torch.full((), part.numel(), dtype=torch.float64, device=part.device)
    return torch.stack([part.abs().sum(dtype=torch.float64), count])
