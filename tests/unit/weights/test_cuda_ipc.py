"""Handles of GPU memory; a GPU and the call that maps its memory are the only doubles."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from gxpo_trainer.weights import transports
from gxpo_trainer.weights.buckets import WeightBucket


def test_a_worker_maps_the_learners_buffer_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's only GPU is device 0 in its process and device 1 in the worker's of tensor parallelism."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    exported = tuple(0 if name == "storage_device" else name for name in names)
    opened: dict[str, Any] = {}

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened.update(zip(names, arguments, strict=True))
        return torch.zeros(3, dtype=torch.uint8)

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu-{device.index}"))
    bucket = WeightBucket(1, 0, True, (), 3, "cuda_ipc", {"gpu-0": ("another rank's",), "gpu-1": exported})
    assert transports.open_handle(bucket, torch.device("cuda:1")).numel() == 3
    assert opened.pop("storage_device") == 1
    assert opened == {name: name for name in names if name != "storage_device"}
