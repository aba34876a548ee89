"""Weights between GPUs: vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gxpo_trainer.sync.checksums import without_signed_zeros
from gxpo_trainer.sync.manifest import WeightManifest, entry_of
from gxpo_trainer.sync.vllm_weights import open_nccl_trainer, weight_source


class NcclPublisher:
    """Sends weights from learner rank 0 to the sampler's GPUs with vLLM's weight transfer.

    Learner and sampler must own different GPUs, because NCCL rejects duplicate devices; on a shared GPU use
    `SharedMemoryPublisher`. `sampler` is the sampler's actor handle. Raises ConfigError without CUDA.

    `publish` drives the sampler's start, update and finish calls and returns when the weights have arrived; pass the
    manifest to `WeightReceiver.receive`, which verifies them.
    """

    def __init__(self, sampler: Any, *, address: str, port: int, num_sampler_gpus: int, dtype: torch.dtype) -> None:
        self._engine = open_nccl_trainer(sampler, address=address, port=port, num_sampler_gpus=num_sampler_gpus)
        self._dtype = dtype

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Send the tensors. Needs device memory for a copy of all of them."""
        # Copied, because the transfer declares all shapes before it sends the first tensor.
        tensors = [(name, without_signed_zeros(tensor.to(self._dtype)).contiguous()) for name, tensor in named_tensors]
        self._engine.source = weight_source(tensors)
        self._engine.send_weights()
        entries = tuple(entry_of(name, tensor) for name, tensor in tensors)
        return WeightManifest(version, entries, sum(tensor.nbytes for _, tensor in tensors), None)

    def close(self) -> None:
        self._engine.shutdown()
