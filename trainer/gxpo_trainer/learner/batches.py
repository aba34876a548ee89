"""What passes of one rank run over: its share of a step batch, packed, with the results of the first pass, and the
frozen start policy of the KL term."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gxpo_trainer.algo.batch import StepBatch
from gxpo_trainer.algo.losses import MAXIMA, combine_statistics
from gxpo_trainer.algo.packing import Layout, MicroBatch, dummy_micro_batch, pack
from gxpo_trainer.config import LearnerConfig, RunConfig
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.learner.setup import Device, load_partitioned, open_frozen_engine
from gxpo_trainer.learner.shards import partitions

Statistics = dict[str, Tensor]
"""float64 scalars of algo.losses.policy_loss."""


@dataclass
class LoadedBatch:
    """Micro-batches on the device, in the order in which every pass runs them.

    grad: those that have a gradient. no_grad: those whose gradient is zero whatever the parameters, so that a pass runs
    them forward only, for the statistics. dummy, dummy_no_grad: micro-batches without weight, with which all ranks make
    the same number of passes of both kinds: ZeRO stages 2 and 3 communicate in each. old, reference: log π_old and
    log π_ref, one float32[T] per micro-batch of `counted`; None until known. first_pass: statistics of the first pass
    over the batch, of all ranks together.
    """

    grad: list[MicroBatch]
    dummy: list[MicroBatch]
    no_grad: list[MicroBatch]
    dummy_no_grad: list[MicroBatch]
    old: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    first_pass: Statistics | None = None

    @property
    def num_passes(self) -> int:
        """Forward and backward passes a rank makes over the batch."""
        return len(self.grad) + len(self.dummy)

    @property
    def counted(self) -> list[MicroBatch]:
        """Micro-batches whose tokens are in the loss."""
        return [*self.grad, *self.no_grad]


def load_share(
    batch: StepBatch, settings: LearnerConfig, *, layout: Layout, pad_id: int, device: torch.device
) -> LoadedBatch:
    """Pack this rank's share. Collective: the ranks agree on the number of passes.

    Without a KL term a sequence of advantage 0 (a group of equal rewards) has no gradient: min(ρ·0, …) is 0 at every
    ρ. Its backward pass, two thirds of the work, is left out.
    """
    has_gradient = [s.in_loss and (s.advantage != 0.0 or settings.loss.kl_beta > 0) for s in batch.sequences]
    pairs = list(zip(batch.sequences, has_gradient, strict=True))

    def packed(keep: bool) -> list[MicroBatch]:
        chosen = [s if gradient == keep else replace(s, in_loss=False) for s, gradient in pairs]
        return pack(
            replace(batch, sequences=tuple(chosen)),
            token_budget=settings.token_budget,
            layout=layout,
            aggregation=settings.loss.aggregation,
            pad_id=pad_id,
        )

    parts = [packed(True), packed(False) if any(s.in_loss and not gradient for s, gradient in pairs) else []]
    counts = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    dummies = [
        [dummy_micro_batch(pad_id) for _ in range(int(count) - len(part))]
        for part, count in zip(parts, counts.tolist(), strict=True)
    ]
    grad, no_grad, dummy, dummy_no_grad = ([micro.to(device) for micro in part] for part in (*parts, *dummies))
    return LoadedBatch(grad, dummy, no_grad, dummy_no_grad)


def sum_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Sum of a small float64 vector over all ranks."""
    total = values.to(device=device, dtype=torch.float64, copy=True)
    torch.distributed.all_reduce(total)
    return total


def statistics_over_ranks(parts: Sequence[Statistics], device: torch.device) -> Statistics:
    """Statistics of this rank's micro-batches combined, then those of all ranks."""
    own: Statistics | None = None
    for part in parts:
        own = combine_statistics(own, part)
    assert own is not None, "a rank has at least one micro-batch"
    sums, maxima = sorted(own.keys() - MAXIMA), sorted(own.keys() & MAXIMA)
    total = sum_over_ranks(torch.stack([own[name].double() for name in sums]), device)
    largest = torch.stack([own[name].double() for name in maxima])
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(sums, total, strict=True)) | dict(zip(maxima, largest, strict=True))


def first_pass_statistics(batches: Sequence[LoadedBatch]) -> Statistics:
    """Statistics of the first passes over all batches that had one. Raises RuntimeError when none had."""
    total: Statistics | None = None
    for batch in batches:
        if batch.first_pass is not None:
            total = combine_statistics(total, batch.first_pass)
    if total is None:
        raise RuntimeError("no pass was made on this batch yet: call backward() or fix_old_logprobs() first")
    return total


class Reference(Protocol):
    """Order: `logprobs` as often as needed; `close`. Neither keeps memory of a GPU in between but `resident`."""

    def logprobs(self, counted: Iterable[MicroBatch], dummy: Iterable[MicroBatch], temperature: float) -> list[Tensor]:
        """log π_ref of each micro-batch of `counted`. Collective: every rank passes as many micro-batches in all."""

    def resident(self) -> list[Tensor]:
        """Tensors on the learner's device."""

    def close(self) -> None: ...


def load_reference(config: RunConfig, attention: str, device: Device, where: torch.device) -> Reference:
    """The policy of `model` without gradients, for runs without an adapter. Collective."""
    if config.learner.zero_stage == 3:
        model = load_partitioned(config, attention, where).requires_grad_(False)
        return PartitionedReference(open_frozen_engine(model, config, device))
    model = load_partitioned(config, attention, torch.device("cpu")).requires_grad_(False)
    return HostReference(model, where)


class PartitionedReference:
    """Each rank holds a part; DeepSpeed gathers layer by layer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @torch.no_grad()
    def logprobs(self, counted: Iterable[MicroBatch], dummy: Iterable[MicroBatch], temperature: float) -> list[Tensor]:
        logprobs = [self._engine(micro, temperature, False).logprobs for micro in counted]
        for micro in dummy:
            self._engine(micro, temperature, False)
        return logprobs

    def resident(self) -> list[Tensor]:
        """The partitions, and small parameters that stay whole."""
        parameters = list(self._engine.module.parameters())
        return [*parameters, *partitions(parameters), *self._engine.module.buffers()]

    def close(self) -> None:
        self._engine.destroy()


class HostReference:
    """Whole on the host: for CPUs pages of the model's files, which the ranks of a node share; for a GPU pinned memory,
    which is copied to it for a pass."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._policy = PolicyModule(model)
        self._device = device
        self._tensors = [*self._policy.parameters(), *self._policy.buffers()]
        if device.type == "cuda":
            for tensor in self._tensors:
                tensor.data = tensor.data.pin_memory()

    @torch.no_grad()
    def logprobs(self, counted: Iterable[MicroBatch], dummy: Iterable[MicroBatch], temperature: float) -> list[Tensor]:
        with self._on_device():
            return [self._policy(micro, temperature, False).logprobs for micro in counted]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        hosted = [tensor.data for tensor in self._tensors]
        try:
            for tensor, host in zip(self._tensors, hosted, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, hosted, strict=True):
                tensor.data = host

    def resident(self) -> list[Tensor]:
        """None: the host's copy stays where it is."""
        return []

    def close(self) -> None:
        self._tensors = []
