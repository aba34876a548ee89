"""The learner's weights on their way out: to the sampler, and into folders that transformers, PEFT and vLLM load.

Under LoRA an exported policy has the adapter merged, W + (alpha/rank)·B·A, computed in fp32; the model itself is not
changed. A perturbation, which the canary publishes, is undone bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import Transport
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.learner.logprobs import num_elements
from gxpo_trainer.learner.models import load_tokenizer
from gxpo_trainer.rules.contract import snapshot, sum_over
from gxpo_trainer.weights.buckets import BucketPacker, ChangeMeter, WeightBucket
from gxpo_trainer.weights.transports import (
    BroadcastGroup,
    BroadcastPublisher,
    CudaIpcPublisher,
    ObjectStorePublisher,
    SharedMemoryPublisher,
)

PEFT_PREFIX = "base_model.model."
BASE_LAYER = ".base_layer"
PIECE = 1 << 20
"""Elements of noise that are drawn at a time."""


def full_weights(model: nn.Module, merged_dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name in a transformers checkpoint, whole tensor in the forward pass's dtype), LoRA merged; tied weights once.

    merged_dtype: of the tensors that an adapter is merged into, None for the forward pass's. In bf16 most of a small
    adapter is rounded away.

    Collective at ZeRO-3: every rank must run the iterator to its end. The tensor may be a view of live memory that
    is released as the iterator moves on: copy it before asking for the next one.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner.removesuffix(BASE_LAYER)) if owner.endswith(BASE_LAYER) and leaf == "weight" else None
        plain = name.removeprefix(PEFT_PREFIX).replace(f"{BASE_LAYER}.", ".")
        if layer is None:
            with _gathered([parameter]):
                yield plain, parameter.detach()
            continue
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with _gathered([parameter, down, up]):
            with torch.no_grad():
                merged = parameter.float() + layer.scaling["default"] * (up.float() @ down.float())
            yield plain, merged.to(merged_dtype or parameter.dtype)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a PEFT adapter file, whole tensor) of each LoRA matrix, none without LoRA; collective as above."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            with _gathered([parameter]):
                yield name.replace(".default.", "."), parameter.detach()


def _gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
    """A context in which ZeRO-3 parameters are whole on every rank; empty for others."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return context


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
            weights = full_weights if self._config.learner.lora is None else adapter_weights
            dtype = self._config.rollout.dtype
            published_as = None if dtype == "auto" else getattr(torch, dtype)
            self._packer = BucketPacker(weights(self._learner.model), published_as)
        assert self._packer is not None, "bucket 0 comes first"
        if self._learner.rank and transport != "cuda_ipc":
            self._packer.pack(None)
            return None, None
        publisher = self._publisher(transport)
        bucket: WeightBucket = publisher.publish(self._packer, version, index)
        if self._learner.rank:
            return bucket, None
        if self._changes is None:
            adapted = self._config.learner.lora is not None
            named = self._learner.model.named_parameters()
            self._changes = ChangeMeter(sum(num_elements(p) for name, p in named if (".lora_" in name) == adapted))
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

    def _publisher(self, transport: Transport) -> Any:
        if transport not in self._publishers:
            device = next(self._learner.model.parameters()).device
            if transport == "shared_memory":
                publisher: Any = SharedMemoryPublisher()
            elif transport == "object_store":
                publisher = ObjectStorePublisher(self._publisher("shared_memory"))
            elif transport == "nccl":
                publisher = BroadcastPublisher(device)
            else:
                publisher = CudaIpcPublisher(device)
            self._publishers[transport] = publisher
        return self._publishers[transport]


def write_policy(learner: DeepSpeedLearner, config: RunConfig, folder: Path) -> None:
    """config.json, model.safetensors and tokenizer of the present weights, LoRA merged. Collective; rank 0 writes.

    Tensors that an adapter is merged into are written in fp32, and config.json names that dtype.
    """
    adapted = config.learner.lora is not None
    weights = _gather(full_weights(learner.model, torch.float32 if adapted else None), keep=learner.rank == 0)
    if learner.rank:
        return
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


def write_adapter(learner: DeepSpeedLearner, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors for PEFT. Collective; rank 0 writes."""
    weights = _gather(adapter_weights(learner.model), keep=learner.rank == 0)
    if learner.rank:
        return
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    learner.model.peft_config["default"].save_pretrained(folder)


def _gather(named: Iterator[tuple[str, Tensor]], *, keep: bool) -> dict[str, Any]:
    """Whole tensors on the CPU; every rank must run the iterator to its end."""
    return {name: tensor.detach().cpu().clone() if keep else None for name, tensor in named}


class Perturbation:
    """Holds the weights as they are at construction. Order: `apply`, as often as needed, then `undo`.

    The noise is normal, `scale` times the mean absolute weight of the whole model: a LoRA factor that starts at zero
    is moved as well.
    """

    def __init__(self, learner: DeepSpeedLearner) -> None:
        self._learner = learner
        self.before = snapshot(learner.parameters(), None)
        """The held weights, which leave the device with the learner's own memory."""

        def absolute_sum(part: Tensor) -> Tensor:
            count = torch.full((), part.numel(), dtype=torch.float64, device=part.device)
            return torch.stack([part.abs().sum(dtype=torch.float64), count])

        total, count = sum_over(learner, absolute_sum, self.before)
        self._magnitude = total / count

    @torch.no_grad()
    def apply(self, scale: float, seed: int) -> None:
        """The held weights plus noise, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        # Copies of one shard must stay copies.
        owner = 0 if self._learner.replicated else self._learner.rank
        for index, shard in enumerate(self._learner.parameters()):
            generator = torch.Generator(device=shard.device).manual_seed(seed + 1000 * owner + index)
            for piece in torch.split(shard, PIECE):
                noise = torch.randn(piece.shape, generator=generator, device=piece.device, dtype=piece.dtype)
                piece.add_(noise, alpha=scale * self._magnitude)
        self._learner.publish()

    def undo(self) -> None:
        """The held weights, published. Collective."""
        snapshot(self.before, self._learner.parameters())
        self._learner.publish()
