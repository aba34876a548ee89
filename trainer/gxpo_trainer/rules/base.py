"""The contract between an update rule and the learner that runs it.

A rule decides how the parameters move during one training step. It has access to flat local shards of the fp32
parameters and a few operations, but not to Ray, DeepSpeed, the model or the loss. The same rule thus runs on a
two-parameter quadratic in a unit test and on eight ranks of ZeRO-3.

Order of the operations in one step (the learner may rely on it):

    backward → [read gradients] → optimizer_step → [read gradients, write parameters → publish] → backward → …

Gradients are readable from the end of `backward()` until the next `backward()`, also after
`optimizer_step()`. Parameters may be written in place at any time between passes; the forward pass uses
them after `publish()`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from gxpo_trainer.types import Metrics, StepReport


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """One full gradient of the step's batch.

    loss: the scalar that was differentiated. grad_norm: global L2 norm before clipping. statistics: the
    policy's metrics of this pass without the `policy/` prefix (loss, clip_fraction, kl, entropy, …).
    A learner returns the same bits on every rank, so that all ranks take the same decisions.
    """

    loss: float
    grad_norm: float
    statistics: Metrics = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Recurrence(Protocol):
    """The base optimizer's element-wise update as a pure function of (θ, state, g, n).

    Called on equally shaped flat tensors (whole shards or chunks of them); updates theta and the moments in
    place. `step` is the 1-based number of this optimizer step (Adam's bias correction needs it).
    """

    @property
    def learning_rate(self) -> float: ...

    @property
    def weight_decay(self) -> float:
        """λ of a decay whose share of a step is −ηλθ, which the predictor `displacement` subtracts."""

    @property
    def moment_names(self) -> tuple[str, ...]: ...

    def __call__(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> None: ...

    def displacement(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> Tensor:
        """What step number `step` adds to the theta before it, given the moments after it."""


class OptimizerState(Protocol):
    """Live view of the base optimizer's state, aligned with `parameters()`."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far; 0 before the first."""

    def set_step(self, step: int) -> None: ...

    def moments(self) -> dict[str, list[Tensor]]:
        """The state tensors by name (AdamW: `exp_avg`, `exp_avg_sq`; SGD with momentum:
        `momentum_buffer`), each a list shaped like `parameters()`; zeros before the first step.
        Writing to them in place changes the optimizer."""


class RuleLearner(Protocol):
    """The operations of a learner that a rule uses. All ranks call them in the same order."""

    def backward(self) -> BackwardResult:
        """One full gradient of this step's batch at the published parameters, clipped; counts one pass."""

    def optimizer_step(self) -> None:
        """One step of the base optimizer on the clipped gradient; publishes the result."""

    def parameters(self) -> list[Tensor]:
        """Local fp32 master shards, flat, no copies, padding left out."""

    def gradients(self) -> list[Tensor]:
        """The gradients that the optimizer uses (clipped), flat, shaped like `parameters()`."""

    def recurrence(self) -> Recurrence | None:
        """The optimizer's recurrence at the current learning rate; None when it has no element-wise form."""

    def publish(self) -> None:
        """Make written master parameters the ones that the forward pass uses."""

    def all_reduce(self, scalars: Tensor) -> Tensor:
        """Sum of a small float64 vector across ranks."""

    def optimizer_state(self) -> OptimizerState:
        """The optimizer's state, to save, restore or fast-forward."""


class Rule(Protocol):
    """One update rule. `state_dict` has everything that it keeps between training steps."""

    name: ClassVar[str]

    def step(self, learner: RuleLearner, *, last: bool = True) -> StepReport:
        """Move the parameters by one step on the learner's current batch and report what was done.

        last: False for all mini-batches of a training step but its last. A gate decides with the last one, once
        per training step.
        """

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable state: gate window, shut-off step, step counter."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class BufferingRule(Protocol):
    """What a rule that holds copies of shards between steps provides in addition to `Rule`."""

    def release_buffers(self) -> None:
        """Drop the copies: the learner is about to leave its devices. The next step takes them again."""


@dataclass(frozen=True)
class Trajectory:
    """The point that K real optimizer steps on the batch reach from θ⁰, and the passes that they took."""

    theta_k: list[Tensor]
    backward_passes: int


@runtime_checkable
class LookAheadRule(Protocol):
    """What a look-ahead rule provides for diagnostics in addition to `Rule`."""

    trajectory: Trajectory | None
    """A true K-step trajectory to measure the next step's θᴷ and θ̃ against; used once."""

    @property
    def look_ahead_steps(self) -> int:
        """K of the next step; 0 after the gate has fired."""

    def activity_threshold(self, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
        """Gradients up to this size have no ratio; `gradients` are those of θ⁰."""
