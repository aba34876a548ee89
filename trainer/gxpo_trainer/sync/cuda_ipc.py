"""Weight transport on shared GPUs: engine workers map the learner's bucket, without a copy through the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

from gxpo_trainer.sync.broadcast import grown
from gxpo_trainer.sync.buckets import BucketPacker, WeightBucket

STORAGE_DEVICE = 6
"""Argument of `rebuild_cuda_tensor` with the index of the device, as the process that exported the tensor counts."""


class CudaIpcPublisher:
    """Packs each bucket into one of two buffers on this rank's GPU and exports a handle.

    Every rank publishes, because a worker can map only memory of its own GPU; `LearnerGroup` merges the handles.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0

    def publish(self, packer: BucketPacker, version: int, index: int) -> WeightBucket:
        """Pack the next tensors of `packer` and export the buffer."""
        self._turn ^= 1
        entries, size = packer.pack(self._allocate)
        torch.cuda.synchronize(self._device)
        _, handle = reductions.reduce_tensor(self._buffers[self._turn])
        location = {device_id(self._device): handle}
        return WeightBucket(version, index, packer.empty, entries, size, "cuda_ipc", location)

    def buffer(self, bucket: WeightBucket) -> torch.Tensor:
        """The newest bucket, uint8[num_bytes]."""
        return self._buffers[self._turn][: bucket.num_bytes]

    def close(self) -> None:
        self._buffers = []

    def _allocate(self, size: int) -> torch.Tensor:
        self._buffers[self._turn] = grown(self._buffers[self._turn], size)
        return self._buffers[self._turn]


def open_handle(bucket: WeightBucket, device: torch.device) -> torch.Tensor:
    """The bucket's buffer on this worker's GPU, uint8[>= num_bytes]."""
    handle: list[Any] = list(bucket.location[device_id(device)])
    # Processes number GPUs differently: the learner sees its own as 0, worker r of an engine as r.
    handle[STORAGE_DEVICE] = device.index
    buffer: torch.Tensor = reductions.rebuild_cuda_tensor(*handle)
    return buffer


def device_id(device: torch.device) -> str:
    """UUID of a GPU, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
