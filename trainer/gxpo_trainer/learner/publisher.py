"""A learner rank's side of a weight sync: packs its weights, or its adapter, for the transport of the run.

The policy's weights as a transformers checkpoint names them, gathered from any ZeRO stage.

Under LoRA an exported policy has the adapter merged, W + (alpha/rank)·B·A, computed in fp32; the model itself is not
changed.

A policy in memory as a folder that transformers, PEFT and vLLM load as it is.

A visible, reproducible change of all weights that can be undone bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import Transport
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.learner.logprobs import num_elements
from gxpo_trainer.learner.models import load_tokenizer
from gxpo_trainer.rules.contract import snapshot, sum_over
from gxpo_trainer.weights.buckets import BucketPacker, ChangeMeter, WeightBucket
from gxpo_trainer.weights.transports import BroadcastGroup, BroadcastPublisher, SharedMemoryPublisher


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
            from gxpo_trainer.weights.object_store import ObjectStorePublisher

            return ObjectStorePublisher(self._publisher("shared_memory"))
        if transport == "nccl":
            return BroadcastPublisher(device)
        if transport == "cuda_ipc":
            from gxpo_trainer.weights.transports import CudaIpcPublisher

            return CudaIpcPublisher(device)
        raise TrainingError(f"unknown weight transport {transport!r}")


def write_policy(learner: DeepSpeedLearner, config: RunConfig, folder: Path) -> None:
    """config.json, model.safetensors and tokenizer of the present weights, LoRA merged. Collective; rank 0 writes.

    Tensors that an adapter is merged into are written in fp32, and config.json names that dtype.
    """
    adapted = config.learner.lora is not None
    weights = _gather(learner.full_weights(torch.float32 if adapted else None), keep=learner.rank == 0)
    if learner.rank:
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    # One file whatever the size: a run's policy is read back by the sampler, which maps it.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model_config = copy.deepcopy(learner.model.config)
    if adapted:
        model_config.dtype = torch.float32
    model_config.save_pretrained(folder)
    generation = getattr(learner.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)


def write_adapter(learner: DeepSpeedLearner, config: RunConfig, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors for PEFT. Collective; rank 0 writes."""
    weights = _gather(learner.adapter_weights(), keep=learner.rank == 0)
    if learner.rank:
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    learner.model.peft_config["default"].save_pretrained(folder)


def _gather(named: Any, *, keep: bool) -> dict[str, Any]:
    """Whole tensors on the CPU; every rank must run the iterator to its end."""
    return {name: tensor.detach().cpu().clone() if keep else None for name, tensor in named}


PIECE = 1 << 20
"""Elements of noise that are drawn at a time."""


class Perturbation:
    """Holds the weights as they are at construction. Order: `apply`, as often as needed, then `undo`.

    The noise is normal, `scale` times the mean absolute weight of the whole model: a LoRA factor that starts at zero
    is moved as well.
    """

    def __init__(self, learner: DeepSpeedLearner) -> None:
        self._learner = learner
        self.before = snapshot(learner.parameters(), None)
        """The held weights, which leave the device with the learner's own memory."""
        total, count = sum_over(learner, _absolute_sum, self.before)
        self._magnitude = total / count

    @torch.no_grad()
    def apply(self, scale: float, seed: int) -> None:
        """The held weights plus noise, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        # Copies of one shard must stay copies.
        owner = 0 if self._learner.replicated else self._learner.rank
        for index, shard in enumerate(self._learner.parameters()):
            generator = torch.Generator(device=shard.device).manual_seed(seed + 1000 * owner + index)
            for piece in shard.split(PIECE):
                noise = torch.randn(piece.shape, generator=generator, device=piece.device, dtype=piece.dtype)
                piece.add_(noise, alpha=scale * self._magnitude)
        self._learner.publish()

    def undo(self) -> None:
        """The held weights, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        self._learner.publish()


def _absolute_sum(part: Tensor) -> Tensor:
    count = torch.full((), part.numel(), dtype=torch.float64, device=part.device)
    return torch.stack([part.abs().sum(dtype=torch.float64), count])
