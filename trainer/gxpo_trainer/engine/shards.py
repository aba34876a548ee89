"""Parameters, gradients and optimizer state of one rank, however ZeRO lays them out.

DeepSpeed partitions, reduces and gathers; the base optimizer then runs here, directly on the partitions. Its own
`engine.step()` is not used: it frees or zeroes the gradient that a rule still wants to read, takes the gradient norm
once more, and skips steps by rules of its own.

| layout | masters | gradient of the pass |
|---|---|---|
| `PlainShards`: stage 0, fp32 | the parameters themselves, whole on every rank | `p.grad` |
| `PartitionedShards`: stages 1, 2 | one flat fp32 partition a rank | copied out of DeepSpeed's reduction lists |
| `Bf16Shards`: stage 1, bf16 | the same, of DeepSpeed's BF16_Optimizer | its persistent fp32 buffer |
| `ScatteredShards`: stage 3 | a slice of every parameter, flat, fp32 | its persistent fp32 buffer |

Every layout pads its partitions; `parameters()`, `gradients()` and the moments leave the padding out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]
"""Start and length of real elements in a padded flat tensor."""


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
        self._masters, self._spans = self._layout()
        self.state = ShardState(optimizer, self._masters, self._unpadded)

    @abstractmethod
    def _layout(self) -> tuple[list[Tensor], list[list[Span]]]:
        """Padded flat masters (the leaves of the base optimizer) and the real elements in each."""

    @abstractmethod
    def _clear(self) -> None:
        """Make DeepSpeed forget the gradient of the last pass."""

    @abstractmethod
    def _reduced(self) -> list[Tensor]:
        """The reduced gradient, fp32, shaped like the masters."""

    @abstractmethod
    def publish(self) -> None:
        """Make the masters the weights of the forward pass, on all ranks."""

    def begin(self) -> None:
        """Forget the gradient of the last pass; what `gradients()` returned is no longer valid."""
        self._gradients = None
        self._clear()

    def collect(self) -> None:
        """Take the gradient of the pass that just ended; it stays as it is until `begin`."""
        self._gradients = self._reduced()

    def parameters(self) -> list[Tensor]:
        """Live flat fp32 masters of this rank without padding; at least one tensor, which may be empty."""
        return self._unpadded(self._masters)

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


class PlainShards(Shards):
    """Stage 0 in fp32: whole parameters on every rank, which are their own masters."""

    replicated = True

    def _layout(self) -> tuple[list[Tensor], list[list[Span]]]:
        masters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return masters, [[(0, p.numel())] for p in masters]

    def _clear(self) -> None:
        for master in self._masters:
            master.grad = None

    def _reduced(self) -> list[Tensor]:
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad.contiguous() for m in self._masters]
        self._clear()
        return gradients

    def publish(self) -> None:
        """Nothing to do: the forward pass reads the masters."""


class PartitionedShards(Shards):
    """Stages 1 and 2: all parameters in one flat buffer, of which each rank owns an equal part."""

    def _layout(self) -> tuple[list[Tensor], list[list[Span]]]:
        return list(self._zero.single_partition_of_fp32_groups), flat_spans(
            self._zero.bit16_groups, self._zero.single_partition_of_fp32_groups
        )

    def _clear(self) -> None:
        self._zero.zero_grad()
        for index in range(len(self._masters)):
            self._zero.averaged_gradients[index] = None
            self._zero.all_grad_tensors[index] = None

    def _reduced(self) -> list[Tensor]:
        flat = []
        for index, master in enumerate(self._masters):
            parts = self._zero.averaged_gradients[index]
            whole = getattr(parts, "flat_partition", None)
            if whole is None:
                whole = torch.cat([part.reshape(-1) for part in parts])
            # Kept here alone: DeepSpeed's per-parameter copies go now, not at the next pass.
            self._zero.averaged_gradients[index] = None
            flat.append(whole.to(master.dtype))
        return flat

    def publish(self) -> None:
        """Copy the partition into the forward weights and gather the others' partitions."""
        self._zero.update_lp_params()


class Bf16Shards(Shards):
    """Stage 1 in bf16: DeepSpeed's BF16_Optimizer, which accumulates over micro-batches in fp32."""

    def _layout(self) -> tuple[list[Tensor], list[list[Span]]]:
        return list(self._zero.fp32_groups_flat_partition), flat_spans(
            self._zero.bf16_groups, self._zero.fp32_groups_flat_partition
        )

    def _clear(self) -> None:
        self._zero.zero_grad()

    def _reduced(self) -> list[Tensor]:
        return list(self._zero.fp32_groups_gradient_flat_partition)

    def publish(self) -> None:
        """Copy the partition into the forward weights and gather the others' partitions."""
        self._zero.update_lp_params()


class ScatteredShards(Shards):
    """Stage 3: every parameter is cut into one slice a rank; a rank's slices lie in one flat buffer a sub-group."""

    def _layout(self) -> tuple[list[Tensor], list[list[Span]]]:
        masters = list(self._zero.fp32_partitioned_groups_flat)
        return masters, [_slice_spans(group, torch.distributed.get_rank()) for group in self._zero.fp16_groups]

    def _clear(self) -> None:
        self._zero.zero_grad()
        # A parameter that the next pass does not reach would keep its old gradient.
        self._zero.grad_partitions_flat_buffer.zero_()

    def _reduced(self) -> list[Tensor]:
        buffer = self._zero.grad_partitions_flat_buffer
        return list(buffer.split([master.numel() for master in self._masters]))

    def _run_optimizer(self) -> None:
        # DeepSpeed leaves the group empty between its steps.
        (group,) = self._optimizer.param_groups
        group["params"] = self._masters
        try:
            self._optimizer.step()
        finally:
            group["params"] = []

    def publish(self) -> None:
        """Copy the masters into the partitions; drop, or gather anew, what is held of whole parameters."""
        self._zero._partition_all_parameters()
        for index in range(len(self._masters)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)


def flat_spans(groups: Iterable[Sequence[Tensor]], partitions: Sequence[Tensor]) -> list[list[Span]]:
    """Real elements of this rank's partition of each group's flat buffer; the padding is at the buffer's end."""
    rank = torch.distributed.get_rank()
    spans = []
    for group, partition in zip(groups, partitions, strict=True):
        total = sum(parameter.numel() for parameter in group)
        size = partition.numel()
        spans.append([(0, min(max(total - rank * size, 0), size))])
    return spans


def _slice_spans(group: Sequence[Any], rank: int) -> list[Span]:
    """Real elements of this rank's slices; slices without padding between them become one span."""
    spans: list[Span] = []
    offset = 0
    for parameter in group:
        size = parameter.partition_numel()
        length = min(max(parameter.ds_numel - rank * size, 0), size)
        if spans and sum(spans[-1]) == offset:
            spans[-1] = (spans[-1][0], spans[-1][1] + length)
        elif length:
            spans.append((offset, length))
        offset += size
    return spans or [(0, 0)]


def open_shards(engine: Any, optimizer: torch.optim.Optimizer, *, zero_stage: int, precision: str) -> Shards:
    """The layout that this stage and precision have."""
    if zero_stage == 0:
        return PlainShards(engine, optimizer)
    if zero_stage == 3:
        return ScatteredShards(engine, optimizer)
    if zero_stage == 1 and precision == "bf16":
        return Bf16Shards(engine, optimizer)
    return PartitionedShards(engine, optimizer)
