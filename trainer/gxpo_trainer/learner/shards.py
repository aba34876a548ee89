"""Parameters, gradients and optimizer state of one rank, however ZeRO lays them out.

DeepSpeed partitions, reduces and gathers; the base optimizer then runs here, directly on the partitions, because
`engine.step()` frees or zeroes the gradient that a rule reads later and skips steps by its own criteria. Every layout
pads its partitions; `parameters()`, `gradients()` and the moments leave the padding out.

| layout | masters | gradient of the pass |
|---|---|---|
| `PlainShards`: stage 0, fp32 | the parameters themselves, whole on every rank | `p.grad` |
| `PartitionedShards`: stages 1, 2 | one flat fp32 partition a rank | copied out of DeepSpeed's reduction lists |
| `Bf16Shards`: stage 1, bf16 | the same, of DeepSpeed's BF16_Optimizer | its persistent fp32 buffer |
| `ScatteredShards`: stage 3 | a slice of every parameter, flat, fp32 | its persistent fp32 buffer |

All uses of DeepSpeed 0.19.8 that are not public calls are in this file: where ZeRO keeps parameters and gradients, and
two patches of its start-up (tests/unit/test_libraries.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.learner.logprobs import whole_shape

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
    """One rank's view of the trainable parameters, and rules.contract.OptimizerState. Built right after
    `deepspeed.initialize`. The moments are zeros from the start, so that a rule may write them before the first step.

    Order within a step: `begin` → passes over the micro-batches → `collect` → `optimizer_step` or writes and `publish`.
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
        self._spans = [spans_of(of_master) for of_master in segments]
        self._segments = [
            [replace(s, offset=s.offset - start) for s in of_master if start <= s.offset < start + length]
            for of_master, spans in zip(segments, self._spans, strict=True)
            for start, length in spans
        ]
        self.step = 0
        """Optimizer steps taken so far."""
        adam = isinstance(optimizer, torch.optim.AdamW)
        with_momentum = not adam and optimizer.param_groups[0]["momentum"] > 0
        self._moments = ["exp_avg", "exp_avg_sq"] if adam else ["momentum_buffer"] * with_momentum
        for master in self._masters:
            entry: dict[str, Any] = {name: torch.zeros_like(master, requires_grad=False) for name in self._moments}
            if adam:
                # The fused kernel reads the count on the parameter's device.
                entry["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            optimizer.state[master] = entry

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
        return {name: tuple(whole_shape(parameter)) for name, parameter in named if parameter.requires_grad}

    def _names(self) -> dict[int, str]:
        """The model's name of each parameter, by identity."""
        return {id(parameter): name for name, parameter in self._engine.module.model.named_parameters()}

    def gradients(self) -> list[Tensor]:
        """Live flat fp32 gradients, shaped like `parameters()`."""
        assert self._gradients is not None, "a pass comes first"
        return self._unpadded(self._gradients)

    def set_step(self, step: int) -> None:
        """Set the count that the bias correction of the next step starts from."""
        self.step = step
        for master in self._masters:
            entry = self._optimizer.state[master]
            if "step" in entry:
                entry["step"].fill_(float(step))

    def moments(self) -> dict[str, list[Tensor]]:
        """Live moments by name, each a list shaped like `parameters()`."""
        return {name: self._unpadded([self._optimizer.state[m][name] for m in self._masters]) for name in self._moments}

    def optimizer_step(self) -> None:
        """One step of the base optimizer on the collected gradient, then `publish`."""
        assert self._gradients is not None, "a pass comes first"
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        (group,) = self._optimizer.param_groups
        held, group["params"] = group["params"], self._masters  # at stage 3 DeepSpeed leaves it empty
        try:
            self._optimizer.step()
        finally:
            group["params"] = held
        for master in self._masters:
            master.grad = None
        self.step += 1  # the optimizer counts in its own state by itself
        self.publish()

    def _unpadded(self, padded: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor.detach().view(-1).narrow(0, start, length)
            for tensor, spans in zip(padded, self._spans, strict=True)
            for start, length in spans
        ]


def spans_of(segments: Sequence[Segment]) -> list[Span]:
    """Real elements of a padded tensor: segments without padding between them are one span; at least one span."""
    spans: list[Span] = []
    for segment in segments:
        if spans and sum(spans[-1]) == segment.offset:
            spans[-1] = (spans[-1][0], spans[-1][1] + segment.length)
        elif segment.length:
            spans.append((segment.offset, segment.length))
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


class Bf16Shards(PartitionedShards):
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
    rank, partitions = torch.distributed.get_rank(), []
    for group, master in zip(groups, masters, strict=True):
        begin, end = rank * master.numel(), (rank + 1) * master.numel()
        position, segments = 0, []
        for parameter in group:
            first, last = max(position, begin), min(position + parameter.numel(), end)
            if first < last:
                segments.append(Segment(names[id(parameter)], first - position, first - begin, last - first))
            position += parameter.numel()
        partitions.append(segments)
    return partitions


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
    """Before `deepspeed.initialize`: it reports memory whatever the log level, collecting all garbage."""
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None


ALIGNMENT = 256
"""Bytes at whose multiples tensors begin in a host buffer."""


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory for copies of `device`: uint8[num_bytes], for a GPU page-locked for as long as the process lives.
    torch's own pinned memory is rounded up to a power of two."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
        if int(status):
            raise torch.cuda.CudaError(int(status))
        _registered.append(buffer)
    return buffer


_registered: list[Tensor] = []
"""Page-locked memory must not go back to the allocator."""


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where tensors of these bytes begin in one buffer, and its size."""
    rounded = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    return list(itertools.accumulate(rounded, initial=0))


class Parking:
    """Moves a learner's memory to the host and back, so that an engine can use the GPU in between.

    Empties storages and fills them again: DeepSpeed's parameters are views of flat buffers, which a move of the tensors
    would break apart. Every tensor and view stays valid in between, but unreadable.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, Tensor | None]] = []
        """Bytes of each storage, and where they are on the host; None for those that come back as zeros."""
        self.host = torch.empty(0, dtype=torch.uint8)
        """Where storages are parked, one after the other; kept for the next time, when they are the same."""

    def park(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> int:
        """Release the memory of all tensors; `dropped` come back as zeros. Returns the bytes released."""
        if self._parked:
            return 0
        contents = _contents(kept, dropped)
        *starts, total = offsets(content.numel() if keep else 0 for content, keep in contents)
        on_gpu = any(content.is_cuda for content, _ in contents)
        if self.host.numel() < total:
            self.host = host_buffer(total, contents[0][0].device)
        for (content, keep), start in zip(contents, starts, strict=True):
            place = self.host[start : start + content.numel()].copy_(content, non_blocking=True) if keep else None
            self._parked.append((content, place))
        if on_gpu:
            torch.cuda.synchronize()
        for content, _ in contents:
            content.untyped_storage().resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()
        return sum(content.numel() for content, _ in contents)

    def unpark(self) -> None:
        """Allocate all storages again and restore their contents."""
        for content, host in self._parked:
            content.untyped_storage().resize_(content.numel())
            if host is None:
                content.zero_()
            else:
                content.copy_(host, non_blocking=True)
        if any(content.is_cuda for content, _ in self._parked):
            torch.cuda.synchronize()
        self._parked = []


def _contents(kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> list[tuple[Tensor, bool]]:
    """The bytes of each storage once, with whether they are kept; those of one that holds a kept tensor are."""
    contents: dict[int, tuple[Tensor, bool]] = {}
    for keep, tensors in ((False, dropped), (True, kept)):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # A file mapped on a CPU cannot be released; on a GPU every storage can.
            if storage.nbytes() and storage.resizable():
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                contents[storage.data_ptr()] = content, keep
    return list(contents.values())
