"""The frozen start policy of the KL term: partitioned at ZeRO stage 3, else on the host between its passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.deepspeed_internals import partitions
from gxpo_trainer.learner.loading import load_partitioned, open_frozen_engine
from gxpo_trainer.learner.process_group import Device
from gxpo_trainer.models.logprobs import PolicyModule


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
        found = [self._engine(micro, temperature, False).logprobs for micro in counted]
        for micro in dummy:
            self._engine(micro, temperature, False)
        return found

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
