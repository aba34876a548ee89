"""Weight transport between GPUs: one broadcast per bucket from learner rank 0 to every engine worker."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gxpo_trainer.errors import TrainingError, WeightsUnavailable
from gxpo_trainer.sync.buckets import BucketPacker, WeightBucket

TIMEOUT_S = 120.0
"""A member that does not join or answer within this time is dead; the group is then built again."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class BroadcastGroup:
    """A process group separate from those of DeepSpeed and vLLM: NCCL on GPUs, Gloo on CPUs.

    member 0 is learner rank 0. Raises WeightsUnavailable when the group cannot be formed or a member is lost.
    """

    def __init__(self, address: str, port: int, member: int, size: int, device: torch.device) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        try:
            store = dist.TCPStore(address, port, size, is_master=member == 0, timeout=timeout)
            if device.type == "cuda":
                self._group: Any = _nccl_group(store, member, size, timeout)
            else:
                self._group = dist.ProcessGroupGloo(store, member, size, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise WeightsUnavailable(f"the weight broadcast group could not be formed: {error}") from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send member 0's buffer, uint8[n] on the group's device, into every other member's."""
        try:
            self._group.broadcast(buffer, 0).wait()
        except (RuntimeError, dist.DistError) as error:
            raise WeightsUnavailable(f"a member of the weight broadcast group was lost: {error}") from error


def _nccl_group(store: Any, member: int, size: int, timeout: timedelta) -> Any:
    """A group whose `wait` returns once the data is there, and raises after `timeout` without it.

    Without TORCH_NCCL_BLOCKING_WAIT a thread of the group ends the process instead, also where `wait` itself is given
    a timeout. The constructor reads the variable; groups of DeepSpeed and vLLM keep their own behaviour.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, member, size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


class BroadcastPublisher:
    """Packs a bucket on the learner's device; `send` broadcasts it while the engines receive."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.group: BroadcastGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def publish(self, packer: BucketPacker, version: int, index: int) -> WeightBucket:
        """Pack the next tensors of `packer`; call `send` for it before the next bucket."""
        entries, size = packer.pack(self._allocate)
        return WeightBucket(version, index, packer.empty, entries, size, "nccl")

    def buffer(self, bucket: WeightBucket) -> torch.Tensor:
        """The newest bucket, uint8[num_bytes]."""
        return self._buffer[: bucket.num_bytes]

    def send(self, bucket: WeightBucket) -> None:
        if self.group is None:
            raise TrainingError("the weight broadcast group does not exist; join it before sending")
        self.group.broadcast(self.buffer(bucket))

    def close(self) -> None:
        self.group = None

    def _allocate(self, size: int) -> torch.Tensor:
        self._buffer = grown(self._buffer, size)
        return self._buffer


def grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """`buffer`, or a copy of it with room for `size` bytes; at least doubled, so that growing costs little."""
    if buffer.numel() >= size:
        return buffer
    larger = torch.empty(max(size, 2 * buffer.numel()), dtype=torch.uint8, device=buffer.device)
    larger[: buffer.numel()].copy_(buffer)
    return larger
