"""The plain step that every rule falls back to, and sums over shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gxpo_trainer.rules.base import BackwardResult, RuleLearner
from gxpo_trainer.types import Metrics, StepReport

CPU_CHUNK = 1 << 15
"""Elements that a CPU core processes at a time, so that operands and temporaries stay in its L2 cache."""
DEVICE_CHUNK = 1 << 25
"""Elements that a GPU processes at a time: 256 MB for each float64 temporary, whatever the size of the shard."""


def chunk_size(device: torch.device) -> int:
    """Elements of a shard on `device` that one operation works on at most."""
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def chunks(*shards: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Equally placed slices of aligned shards, of at most `chunk_size` elements."""
    for tensors in zip(*shards, strict=True):
        size = chunk_size(tensors[0].device)
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


def reduce_sums(learner: RuleLearner, sums: Tensor) -> list[float]:
    """A small float64 vector summed over ranks, as Python floats."""
    return [float(x) for x in learner.all_reduce(sums)]


def sum_over(learner: RuleLearner, function: Callable[..., Tensor], *shards: Sequence[Tensor]) -> list[float]:
    """Σ over all coordinates of all ranks of a function that maps slices to a small float64 vector."""
    total: Tensor | None = None
    for parts in chunks(*shards):
        value = function(*parts)
        total = value if total is None else total + value
    if total is None:
        raise ValueError("the learner has no parameters on this rank")
    return reduce_sums(learner, total)


def snapshot(tensors: Sequence[Tensor], buffers: list[Tensor] | None) -> list[Tensor]:
    """Copies of shards, into `buffers` where they are given."""
    if buffers is None:
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
    """`policy/…` of the last pass and `policy/pass<n>/…` of each, n from 1."""
    out: Metrics = {}
    for number, result in enumerate(passes, start=1):
        named = {"loss": result.loss, **result.statistics}
        out.update({f"policy/pass{number}/{name}": value for name, value in named.items()})
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
    (square,) = sum_over(learner, _square_distance, left, right)
    return math.sqrt(square)


def cosine(learner: RuleLearner, left: Sequence[Tensor], right: Sequence[Tensor]) -> float | None:
    """cos(left, right) over all ranks; None when one of them is zero."""
    dot, first, second = sum_over(learner, _dots, left, right)
    return dot / math.sqrt(first * second) if first > 0 and second > 0 else None


def rms(
    learner: RuleLearner, shards: Sequence[Tensor], origin: Sequence[Tensor] | None = None, kept: float = 1.0
) -> float:
    """Root mean square of all coordinates of all ranks: of `shards`, or of shards − kept · origin."""

    def square_and_count(value: Tensor, start: Tensor | None = None) -> Tensor:
        change = value if start is None else value - start * kept
        return _stack(change.square(), torch.ones_like(value))

    square, count = sum_over(learner, square_and_count, shards, *([] if origin is None else [origin]))
    return math.sqrt(square / count)


def finish_plain_step(learner: RuleLearner, first: BackwardResult) -> StepReport:
    """The optimizer step on a gradient that was just taken; skipped when that is not finite."""
    metrics = {"grad/norm_g0": first.grad_norm, **policy_metrics([first])}
    if not first.finite:
        return StepReport(metrics, backward_passes=1, finite=False, fallback="the gradient is not finite")
    learner.optimizer_step()
    norm = last_step_norm(learner)
    if norm is not None:
        metrics["update/norm"] = norm
    return StepReport(metrics, backward_passes=1)


def last_step_norm(learner: RuleLearner) -> float | None:
    """‖θ_after − θ_before‖ of the optimizer step just taken, without a copy of θ_before.

    Computed from the moments after the step. With weight decay the parameters after the step replace those before it, a
    relative error of ηλ. None without an element-wise recurrence.
    """
    recurrence = learner.recurrence()
    if recurrence is None:
        return None
    state = learner.optimizer_state()
    moments = state.moments()
    names = recurrence.moment_names
    step = state.step

    def square(theta: Tensor, gradient: Tensor, *moment_parts: Tensor) -> Tensor:
        change = recurrence.displacement(theta, moment_parts, gradient, step)
        return _stack(change.square())

    (total,) = sum_over(learner, square, learner.parameters(), learner.gradients(), *(moments[n] for n in names))
    return math.sqrt(total)


def _stack(*terms: Tensor) -> Tensor:
    return torch.stack([term.sum(dtype=torch.float64) for term in terms])


def _square_distance(left: Tensor, right: Tensor) -> Tensor:
    return _stack((left - right).square())


def _dots(left: Tensor, right: Tensor) -> Tensor:
    return _stack(left * right, left.square(), right.square())
