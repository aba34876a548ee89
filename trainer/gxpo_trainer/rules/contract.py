"""The contract between an update rule and the learner that runs it.

A rule decides how the parameters move during one training step. It sees flat local shards of the fp32 parameters and a
few operations, so that it runs on a two-parameter quadratic in a unit test and on eight ranks of ZeRO-3.

Order of the operations in one step (the learner may rely on it):

    backward → [read gradients] → optimizer_step → [read gradients, write parameters → publish] → backward → …

Gradients are readable from the end of `backward()` until the next `backward()`, also after `optimizer_step()`.
Parameters may be written in place at any time between passes; the forward pass uses them after `publish()`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.plugins import implementation
from gxpo_trainer.types import Metrics, StepReport


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """One full gradient of the step's batch; the same bits on every rank, so that all ranks take the same decisions.

    loss: the scalar that was differentiated. grad_norm: global L2 norm before clipping. statistics: the policy's
    metrics of this pass without the `policy/` prefix; `entropy` is that of the first pass over the batch.
    """

    loss: float
    grad_norm: float
    statistics: Metrics = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


Passes = list[BackwardResult]


@dataclass(frozen=True, slots=True)
class AdamWRecurrence:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with decoupled weight decay, as torch.optim.AdamW.

    An element-wise update as a pure function of (θ, state, g, n), for equally shaped flat tensors (whole shards or
    chunks of them). A call updates theta and the moments in place; `step` is the 1-based number of this optimizer step.
    weight_decay: λ of a decay whose share of a step is −ηλθ, which the predictor `displacement` subtracts.
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __call__(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> None:
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
    """Gradient descent, optional (heavy-ball) momentum, weight decay added to the gradient, as torch.optim.SGD.

    See AdamWRecurrence.
    """

    learning_rate: float
    momentum: float
    weight_decay: float

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def __call__(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> None:
        if self.momentum:
            moments[0].mul_(self.momentum).add_(gradient)
            if self.weight_decay:
                moments[0].add_(theta, alpha=self.weight_decay)
        theta.add_(self.displacement(theta, moments, gradient, step))

    def displacement(self, theta: Tensor, moments: Sequence[Tensor], gradient: Tensor, step: int) -> Tensor:
        if self.momentum:
            return moments[0].mul(-self.learning_rate)
        change = gradient.mul(-self.learning_rate)
        if self.weight_decay:
            change.add_(theta, alpha=-self.learning_rate * self.weight_decay)
        return change


Recurrence = AdamWRecurrence | SGDRecurrence


class OptimizerState(Protocol):
    """Live view of the base optimizer's state, aligned with `parameters()`."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far; 0 before the first."""

    def set_step(self, step: int) -> None: ...

    def moments(self) -> dict[str, list[Tensor]]:
        """The live state tensors by name (AdamW: `exp_avg`, `exp_avg_sq`; SGD with momentum: `momentum_buffer`), each a
        list shaped like `parameters()`; zeros before the first step."""


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

    def recurrence(self) -> Recurrence:
        """The optimizer's recurrence at the current learning rate."""

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


@runtime_checkable
class LookAheadRule(Protocol):
    """What a look-ahead rule provides for diagnostics in addition to `Rule`."""

    trajectory: list[Tensor] | None
    """The point that K real optimizer steps reach, to measure the next step's θᴷ and θ̃ against; used once."""

    @property
    def look_ahead_steps(self) -> int:
        """K of the next step; 0 after the gate has fired."""

    def activity_threshold(self, learner: RuleLearner, gradients: Sequence[Tensor]) -> float:
        """Gradients up to this size have no ratio; `gradients` are those of θ⁰."""


CPU_CHUNK = 1 << 15
"""Elements that a CPU core processes at a time, so that operands and temporaries stay in its L2 cache."""
DEVICE_CHUNK = 1 << 25
"""Elements that a GPU processes at a time: 256 MB for each float64 temporary, whatever the size of the shard."""


def chunks(*shards: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Equally placed slices of aligned shards, of at most CPU_CHUNK or DEVICE_CHUNK elements."""
    for tensors in zip(*shards, strict=True):
        size = CPU_CHUNK if tensors[0].device.type == "cpu" else DEVICE_CHUNK
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


def reduce_sums(learner: RuleLearner, sums: Tensor) -> list[float]:
    """A small float64 vector summed over ranks, as Python floats."""
    return [float(x) for x in learner.all_reduce(sums)]


def sum_over(learner: RuleLearner, terms: Callable[..., Sequence[Tensor]], *shards: Sequence[Tensor]) -> list[float]:
    """Σ in float64, over all coordinates of all ranks, of each term that a function maps slices to."""
    sums = (torch.stack([term.sum(dtype=torch.float64) for term in terms(*parts)]) for parts in chunks(*shards))
    return reduce_sums(learner, functools.reduce(torch.add, sums))


def snapshot(tensors: Sequence[Tensor], buffers: list[Tensor] | None = None) -> list[Tensor]:
    """Copies of shards, into `buffers` where there are any."""
    if not buffers:
        return [tensor.detach().clone() for tensor in tensors]
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor)
    return buffers


def reposition(theta: Sequence[Tensor], theta0: Sequence[Tensor], alpha: float) -> None:
    """θ ← θ⁰ + α(θ − θ⁰), in place; α = 1 leaves θ to the bit."""
    if alpha == 1.0:
        return
    for live, start in zip(theta, theta0, strict=True):
        live.sub_(start).mul_(alpha).add_(start)


def policy_metrics(passes: Sequence[BackwardResult]) -> Metrics:
    """`policy/…` of the last pass and `policy/pass<n>/…` of each, n from 1; the entropy is that of the first."""
    out: Metrics = {}
    for number, result in enumerate(passes, start=1):
        named = {"loss": result.loss, **result.statistics}
        own = {name: value for name, value in named.items() if number == 1 or name != "entropy"}
        out.update({f"policy/pass{number}/{name}": value for name, value in own.items()})
        out.update({f"policy/{name}": value for name, value in named.items()})
    return out


def norm(learner: RuleLearner, shards: Sequence[Tensor]) -> float:
    """‖shards‖ over all ranks, in float64; no copy beyond DEVICE_CHUNK elements."""
    parts = [part for shard in shards for part in torch.split(shard, DEVICE_CHUNK)]
    squares = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]
    (square,) = reduce_sums(learner, torch.stack(squares).sum()[None])
    return math.sqrt(square)


def distance(learner: RuleLearner, left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """‖left − right‖ over all ranks."""
    (square,) = sum_over(learner, lambda a, b: [(a - b).square()], left, right)
    return math.sqrt(square)


def cosine(learner: RuleLearner, left: Sequence[Tensor], right: Sequence[Tensor]) -> float | None:
    """cos(left, right) over all ranks; None when one of them is zero."""
    dot, first, second = sum_over(learner, lambda a, b: (a * b, a.square(), b.square()), left, right)
    return dot / math.sqrt(first * second) if first > 0 and second > 0 else None


def rms(
    learner: RuleLearner, shards: Sequence[Tensor], origin: Sequence[Tensor] | None = None, kept: float = 1.0
) -> float:
    """Root mean square of all coordinates of all ranks: of `shards`, or of shards − kept · origin."""

    def square_and_count(value: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        change = value if start is None else value - start * kept
        return change.square(), torch.ones_like(value)

    square, count = sum_over(learner, square_and_count, shards, *([] if origin is None else [origin]))
    return math.sqrt(square / count)


def finish_plain_step(learner: RuleLearner, first: BackwardResult) -> StepReport:
    """The optimizer step on a gradient that was just taken; skipped when that is not finite."""
    metrics = {"grad/norm_g0": first.grad_norm, **policy_metrics([first])}
    if not first.finite:
        return StepReport(metrics, backward_passes=1, finite=False, fallback="the gradient is not finite")
    learner.optimizer_step()
    metrics["update/norm"] = last_step_norm(learner)
    return StepReport(metrics, backward_passes=1)


def finish_passes(
    learner: RuleLearner, passes: Sequence[BackwardResult], theta0: Sequence[Tensor], metrics: Metrics
) -> StepReport:
    """The report of a step of several passes from θ⁰; a last gradient that is not finite has made it fall back."""
    metrics = {"grad/norm_g0": passes[0].grad_norm, **metrics, **policy_metrics(passes)}
    metrics["update/norm"] = distance(learner, learner.parameters(), theta0)
    why = None if passes[-1].finite else f"the gradient of pass {len(passes)} is not finite"
    return StepReport(metrics, backward_passes=len(passes), fallback=why)


def last_step_norm(learner: RuleLearner) -> float:
    """‖θ_after − θ_before‖ of the optimizer step just taken, from the moments after it.

    With weight decay the parameters after the step replace those before it, a relative error of ηλ.
    """
    recurrence, state = learner.recurrence(), learner.optimizer_state()
    moments, step = state.moments(), state.step

    def square(theta: Tensor, gradient: Tensor, *moment_parts: Tensor) -> list[Tensor]:
        return [recurrence.displacement(theta, moment_parts, gradient, step).square()]

    named = (moments[name] for name in recurrence.moment_names)
    (total,) = sum_over(learner, square, learner.parameters(), learner.gradients(), *named)
    return math.sqrt(total)


class Stateless:
    """A rule that keeps nothing between training steps: an empty state in checkpoints."""

    name: ClassVar[str]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.name} has no state, but was given {sorted(state)}")


def make_rule(settings: RuleSettings) -> Rule:
    """The rule that `learner.rule` asks for, in its starting state."""
    rule: Rule = implementation(settings)(settings)
    return rule
