"""A learner rank's side of a weight sync: packs its weights, or its adapter, for the transport of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.transport import Transport
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.models.size import num_elements
from gxpo_trainer.sync.broadcast import BroadcastGroup, BroadcastPublisher
from gxpo_trainer.sync.buckets import BucketPacker, WeightBucket
from gxpo_trainer.sync.changes import ChangeMeter
from gxpo_trainer.sync.shared_memory import SharedMemoryPublisher


class RankPublisher:
    """Packs buckets in step with the other ranks, because at ZeRO-3 gathering a tensor is collective."""

    def __init__(self, learner: DeepSpeedLearner, config: RunConfig) -> None:
        self._learner, self._config = learner, config
        self._packer: BucketPacker | None = None
        self._publishers: dict[Transport, Any] = {}
        self._changes: ChangeMeter | None = None

    def next_bucket(self, version: int, index: int, transport: Transport) -> tuple[WeightBucket | None, float | None]:
        """See LearnerRank.next_bucket. Index 0 starts a new version, also when the one before was not finished."""
        if index == 0:
            if self._packer is not None:
                self._packer.close()
            self._packer = BucketPacker(self._named_tensors(), self._dtype())
        assert self._packer is not None, "bucket 0 comes first"
        if self._learner.rank and transport != "cuda_ipc":
            self._packer.pack(None)
            return None, None
        publisher = self._publisher(transport)
        bucket: WeightBucket = publisher.publish(self._packer, version, index)
        if self._learner.rank:
            return bucket, None
        if self._changes is None:
            self._changes = ChangeMeter(self._num_elements())
        return bucket, self._changes.add(bucket, publisher.buffer(bucket))

    def join_broadcast(self, address: str, port: int, size: int) -> None:
        """Open the broadcast group as its member 0; returns when every member has joined."""
        publisher = self._publisher("nccl")
        publisher.group = BroadcastGroup(address, port, 0, size, publisher.device)

    def send(self, bucket: WeightBucket) -> None:
        self._publisher("nccl").send(bucket)

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.full_weights() if self._config.learner.lora is None else self._learner.adapter_weights()

    def _num_elements(self) -> int:
        """Elements of a version."""
        adapted = self._config.learner.lora is not None
        named = self._learner.model.named_parameters()
        return sum(num_elements(p) for name, p in named if (".lora_" in name) == adapted)

    def _dtype(self) -> torch.dtype | None:
        wanted = self._config.rollout.dtype
        return None if wanted == "auto" else getattr(torch, wanted)

    def _publisher(self, transport: Transport) -> Any:
        if transport not in self._publishers:
            self._publishers[transport] = self._make(transport)
        return self._publishers[transport]

    def _make(self, transport: Transport) -> Any:
        device = next(self._learner.model.parameters()).device
        if transport == "shared_memory":
            return SharedMemoryPublisher()
        if transport == "object_store":
            from gxpo_trainer.sync.object_store import ObjectStorePublisher

            return ObjectStorePublisher(self._publisher("shared_memory"))
        if transport == "nccl":
            return BroadcastPublisher(device)
        if transport == "cuda_ipc":
            from gxpo_trainer.sync.cuda_ipc import CudaIpcPublisher

            return CudaIpcPublisher(device)
        raise TrainingError(f"unknown weight transport {transport!r}")
