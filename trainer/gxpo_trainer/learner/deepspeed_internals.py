"""All uses of DeepSpeed 0.19.8 that are not public calls: where ZeRO keeps parameters and gradients, and two patches
of its start-up.

| layout | masters | gradient of the pass |
|---|---|---|
| `PlainShards`: stage 0, fp32 | the parameters themselves, whole on every rank | `p.grad` |
| `PartitionedShards`: stages 1, 2 | one flat fp32 partition a rank | copied out of DeepSpeed's reduction lists |
| `Bf16Shards`: stage 1, bf16 | the same, of DeepSpeed's BF16_Optimizer | its persistent fp32 buffer |
| `ScatteredShards`: stage 3 | a slice of every parameter, flat, fp32 | its persistent fp32 buffer |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.learner.shards import Shards, Span


def open_shards(engine: Any, optimizer: torch.optim.Optimizer, *, zero_stage: int, precision: str) -> Shards:
    """The layout that this stage and precision have."""
    if zero_stage == 0:
        return PlainShards(engine, optimizer)
    if zero_stage == 3:
        return ScatteredShards(engine, optimizer)
    if zero_stage == 1 and precision == "bf16":
        return Bf16Shards(engine, optimizer)
    return PartitionedShards(engine, optimizer)


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
            # The only reference: DeepSpeed's per-parameter copies are freed now, not at the next pass.
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

    def gradient_buffers(self) -> list[Tensor]:
        return [*super().gradient_buffers(), *self._zero.fp32_groups_gradients_flat]

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

    def persistent(self) -> list[Tensor]:
        partitions = [parameter.ds_tensor for group in self._zero.fp16_groups for parameter in group]
        return [*super().persistent(), *partitions]

    def gradient_buffers(self) -> list[Tensor]:
        return [*super().gradient_buffers(), self._zero.grad_partitions_flat_buffer]

    def _run_optimizer(self) -> None:
        # DeepSpeed leaves the group empty between its steps.
        (group,) = self._optimizer.param_groups
        group["params"] = self._masters
        try:
            self._optimizer.step()
        finally:
            group["params"] = []

    def publish(self) -> None:
        """Copy the masters into the partitions; release whole parameters, or gather them again."""
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


def skip_compiled_ops() -> None:
    """Before `deepspeed.init_distributed` on a CPU: without this its shared-memory all-reduce would be compiled at the
    first start, for minutes; gloo does."""
    import deepspeed.ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)


def silence_memory_reports() -> None:
    """Before `deepspeed.initialize`: it reports memory whatever the log level, with a full garbage collection each
    time."""
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
