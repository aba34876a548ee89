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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.learner.shards import Segment, Shards


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

    def _layout(self) -> tuple[list[Tensor], list[list[Segment]]]:
        masters = [p for group in self._optimizer.param_groups for p in group["params"]]
        names = self._names()
        return masters, [[Segment(names[id(p)], 0, 0, p.numel())] for p in masters]

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

    def _layout(self) -> tuple[list[Tensor], list[list[Segment]]]:
        masters = list(self._zero.single_partition_of_fp32_groups)
        return masters, flat_segments(self._zero.bit16_groups, masters, self._names())

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

    def _layout(self) -> tuple[list[Tensor], list[list[Segment]]]:
        masters = list(self._zero.fp32_groups_flat_partition)
        return masters, flat_segments(self._zero.bf16_groups, masters, self._names())

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

    def _layout(self) -> tuple[list[Tensor], list[list[Segment]]]:
        masters, names = list(self._zero.fp32_partitioned_groups_flat), self._names()
        return masters, [_slices(group, names) for group in self._zero.fp16_groups]

    def _clear(self) -> None:
        self._zero.zero_grad()
        # A parameter that the next pass does not reach would keep its old gradient.
        self._zero.grad_partitions_flat_buffer.zero_()

    def _reduced(self) -> list[Tensor]:
        buffer = self._zero.grad_partitions_flat_buffer
        return list(buffer.split([master.numel() for master in self._masters]))

    def persistent(self) -> list[Tensor]:
        # All of the model: under LoRA the frozen base weights are in no group of the optimizer.
        return [*super().persistent(), *partitions(self._engine.module.parameters())]

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


def partitions(parameters: Iterable[Any]) -> list[Tensor]:
    """This rank's slice of each parameter at stage 3."""
    return [parameter.ds_tensor for parameter in parameters]


def flat_segments(
    groups: Iterable[Sequence[Tensor]], masters: Sequence[Tensor], names: Mapping[int, str]
) -> list[list[Segment]]:
    """What this rank's partition of each group's flat buffer holds; the padding is at the buffer's end."""
    rank, found = torch.distributed.get_rank(), []
    for group, master in zip(groups, masters, strict=True):
        begin, end = rank * master.numel(), (rank + 1) * master.numel()
        position, segments = 0, []
        for parameter in group:
            first, last = max(position, begin), min(position + parameter.numel(), end)
            if first < last:
                segments.append(Segment(names[id(parameter)], first - position, first - begin, last - first))
            position += parameter.numel()
        found.append(segments)
    return found


def _slices(group: Sequence[Any], names: Mapping[int, str]) -> list[Segment]:
    """What this rank's slices of a sub-group's parameters hold; each slice may end in padding."""
    rank, offset, segments = torch.distributed.get_rank(), 0, []
    for parameter in group:
        size = parameter.partition_numel()
        length = min(max(parameter.ds_numel - rank * size, 0), size)
        if length:
            segments.append(Segment(names[id(parameter)], rank * size, offset, length))
        offset += size
    return segments


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
