"""Parameters, gradients and optimizer state of one rank, however ZeRO lays them out.

DeepSpeed partitions, reduces and gathers; the base optimizer then runs here, directly on the partitions. Its own
`engine.step()` is not used: it frees or zeroes the gradient that a rule reads later, computes the gradient norm a
second time, and skips steps by its own criteria.

The layouts themselves are in deepspeed_internals.py. Every layout pads its partitions; `parameters()`, `gradients()`
and the moments leave the padding out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.models.size import whole_shape

Span = tuple[int, int]
"""Start and length of real elements in a padded flat tensor."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a piece of a parameter lies: `length` elements at `offset` of a flat tensor are those from `start` of the
    flattened parameter on."""

    parameter: str
    start: int
    offset: int
    length: int


class Shards(ABC):
    """One rank's view of the trainable parameters. Built right after `deepspeed.initialize`.

    Order within a step: `begin` → passes over the micro-batches → `collect` → `step` or writes and `publish`.
    Gradients are readable from `collect` until the next `begin`.
    """

    replicated = False
    """True where every rank holds all parameters, so that sums over ranks count each as often as there are ranks."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._optimizer = optimizer
        self._gradients: list[Tensor] | None = None
        self._masters, segments = self._layout()
        self._spans = [spans_of(found) for found in segments]
        self._segments = [
            [
                replace(found, offset=found.offset - start)
                for found in of_master
                if start <= found.offset < start + length
            ]
            for of_master, spans in zip(segments, self._spans, strict=True)
            for start, length in spans
        ]
        self.state = ShardState(optimizer, self._masters, self._unpadded)

    @abstractmethod
    def _layout(self) -> tuple[list[Tensor], list[list[Segment]]]:
        """Padded masters (the leaves of the base optimizer) and what their real elements are, by offset."""

    @abstractmethod
    def _clear(self) -> None:
        """Discard DeepSpeed's gradient of the last pass."""

    @abstractmethod
    def _reduced(self) -> list[Tensor]:
        """The reduced gradient, fp32, shaped like the masters."""

    @abstractmethod
    def publish(self) -> None:
        """Make the masters the weights of the forward pass, on all ranks."""

    def persistent(self) -> list[Tensor]:
        """Tensors that keep their contents between steps: masters, moments, forward partitions."""
        moments = [value for m in self._masters for value in self._optimizer.state[m].values()]
        return [*self._masters, *moments]

    def gradient_buffers(self) -> list[Tensor]:
        """Buffers for gradients that outlive a step; their contents do not matter between steps."""
        self._gradients = None
        return []

    def begin(self) -> None:
        """Discard the gradient of the last pass; what `gradients()` returned is no longer valid."""
        self._gradients = None
        self._clear()

    def collect(self) -> None:
        """Take the gradient of the pass that just ended; it stays as it is until `begin`."""
        self._gradients = self._reduced()

    def parameters(self) -> list[Tensor]:
        """Live flat fp32 masters of this rank without padding; at least one tensor, which may be empty."""
        return self._unpadded(self._masters)

    def segments(self) -> list[list[Segment]]:
        """What each tensor of `parameters()` holds; the ranks together hold every element once, replicas each all."""
        return self._segments

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every trainable parameter by the model's name for it."""
        named = self._engine.module.model.named_parameters()
        return {name: whole_shape(parameter) for name, parameter in named if parameter.requires_grad}

    def _names(self) -> dict[int, str]:
        """The model's name of each parameter, by identity."""
        return {id(parameter): name for name, parameter in self._engine.module.model.named_parameters()}

    def gradients(self) -> list[Tensor]:
        """Live flat fp32 gradients, shaped like `parameters()`. Raises RuntimeError before the first pass."""
        if self._gradients is None:
            raise RuntimeError("there is no gradient to read: call backward() first")
        return self._unpadded(self._gradients)

    def step(self) -> None:
        """One step of the base optimizer on the collected gradient, then `publish`."""
        if self._gradients is None:
            raise RuntimeError("there is no gradient to step on: call backward() first")
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._run_optimizer()
        for master in self._masters:
            master.grad = None
        self.state.count_step()
        self.publish()

    def _run_optimizer(self) -> None:
        self._optimizer.step()

    def _unpadded(self, padded: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor.detach().view(-1).narrow(0, start, length)
            for tensor, spans in zip(padded, self._spans, strict=True)
            for start, length in spans
        ]


def spans_of(segments: Sequence[Segment]) -> list[Span]:
    """Real elements of a padded tensor: segments without padding between them are one span; at least one span."""
    spans: list[Span] = []
    for found in segments:
        if spans and sum(spans[-1]) == found.offset:
            spans[-1] = (spans[-1][0], spans[-1][1] + found.length)
        elif found.length:
            spans.append((found.offset, found.length))
    return spans or [(0, 0)]


class ShardState:
    """The base optimizer's state, aligned with `parameters()`; see rules.base.OptimizerState.

    It exists from the start, all zeros, so that a rule may copy or write it before the first step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: list[Tensor],
        unpadded: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._unpadded = unpadded
        self._names = moment_names(optimizer)
        self._step = 0
        for master in masters:
            entry: dict[str, Any] = {name: torch.zeros_like(master, requires_grad=False) for name in self._names}
            if isinstance(optimizer, torch.optim.AdamW):
                # The fused kernel reads the count on the parameter's device.
                entry["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            optimizer.state[master] = entry

    @property
    def step(self) -> int:
        """Optimizer steps taken so far; 0 before the first."""
        return self._step

    def set_step(self, step: int) -> None:
        """Set the count that the bias correction of the next step starts from."""
        self._step = step
        for master in self._masters:
            entry = self._optimizer.state[master]
            if "step" in entry:
                entry["step"].fill_(float(step))

    def count_step(self) -> None:
        """Note that the optimizer has taken a step (it counts in its own state by itself)."""
        self._step += 1

    def moments(self) -> dict[str, list[Tensor]]:
        """Live moments by name, each a list shaped like `parameters()`."""
        return {name: self._unpadded([self._optimizer.state[m][name] for m in self._masters]) for name in self._names}


def moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the state tensors of AdamW and of SGD (with momentum, else none)."""
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()
