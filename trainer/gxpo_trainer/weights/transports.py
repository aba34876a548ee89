"""The four transports of a weight sync, each a publisher in the learner and its counterpart in an engine worker."""

from __future__ import annotations

import mmap
import os
import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import reductions

from gxpo_trainer.config.engines import WEIGHT_BUCKET_BYTES, Transport
from gxpo_trainer.errors import TrainingError, WeightsUnavailable
from gxpo_trainer.runtime.locks import OwnedDirectory
from gxpo_trainer.runtime.processes import LOOPBACK, interface_to, listen_on
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket, read_only_view

SHM_ROOT = Path("/dev/shm")
PREFIX = "gxpo-weights-"


class Publisher(ABC):
    """Packs buckets into buffers that take turns, so that a bucket stays readable while the next is written."""

    transport: Transport
    num_buffers = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * self.num_buffers
        self._turn = 0

    def publish(self, packer: BucketPacker, version: int, index: int) -> WeightBucket:
        """Copy the next tensors of `packer` (any device) into the next buffer."""
        self._turn = (self._turn + 1) % len(self._buffers)
        entries, size = packer.pack(self._allocate)
        return WeightBucket(version, index, packer.empty, entries, size, self.transport, self._location(size))

    def buffer(self, bucket: WeightBucket) -> torch.Tensor:
        """The newest bucket, uint8[num_bytes]; overwritten when its buffer has its turn again."""
        return self._buffers[self._turn][: bucket.num_bytes]

    def close(self) -> None:
        """Release the buffers."""
        self._buffers = []

    @abstractmethod
    def _location(self, num_bytes: int) -> Any:
        """Of the current buffer; see WeightBucket."""

    def _allocate(self, size: int) -> torch.Tensor:
        """The current buffer as uint8[>= size], grown as needed with its contents kept."""
        self._buffers[self._turn] = grown(self._buffers[self._turn], size)
        return self._buffers[self._turn]


class SharedMemoryPublisher(Publisher):
    """Writes buckets into two alternating files in a private directory (mode 0700).

    `publish` raises TrainingError (disk_full) when the shared memory is full.
    """

    transport = "shared_memory"
    num_buffers = 2

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._owned = OwnedDirectory(SHM_ROOT, PREFIX)
        self.directory = self._owned.path

    def store(self, content: torch.Tensor) -> str:
        """Copy a received buffer into shared memory; its path. For engines that received it by another transport."""
        self._turn ^= 1
        self._allocate(content.numel())[: content.numel()].copy_(content)
        return self._location(content.numel())

    def close(self) -> None:
        """Remove the directory; the memory is freed when the engines have unmapped it."""
        self._owned.close()

    def _location(self, num_bytes: int) -> str:
        return str(self.directory / f"buffer-{self._turn}")

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = self._buffers[self._turn]
        if buffer.numel() >= size:
            return buffer
        descriptor = os.open(self._location(size), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Allocated up front: writing to a full tmpfs through a mapping raises SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            buffer = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except OSError as error:
            message = (
                f"Cannot allocate a weight bucket of {size / 2**30:.2g} GiB in {self.directory.parent} "
                f"({error.strerror}), which must hold two of them in addition to Ray's object store; raise shm_size "
                "(RAY_SHM_SIZE in docker-compose.yml)"
            )
            raise TrainingError(message, reason="disk_full") from error
        finally:
            os.close(descriptor)
        self._buffers[self._turn] = buffer
        return buffer


class SharedMemoryReader:
    """Maps published buckets, keeping the two files of one publisher mapped."""

    def __init__(self) -> None:
        self._maps: dict[tuple[Path, int], torch.Tensor] = {}
        """By path and size: a file grows."""

    def read(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's buffer, uint8[>= num_bytes], read-only. Raises WeightsUnavailable when the file is gone."""
        path = Path(bucket.location)
        try:
            key = path, path.stat().st_size
        except FileNotFoundError as error:
            raise WeightsUnavailable(
                f"weights version {bucket.version} was published in {bucket.location}, which does not exist on this "
                "host: either the publisher has closed, or learner and sampler are on different hosts"
            ) from error
        if key not in self._maps:
            self._maps = dict(list(self._maps.items())[-1:])
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            self._maps[key] = read_only_view(mapped)
        return self._maps[key]


class ObjectStorePublisher(Publisher):
    """Puts each bucket into Ray's object store, for engines on other hosts. `publish` raises TrainingError (disk_full).

    The object stores of the learner's and of each engine's node need room for two buckets. An object is owned by the
    learner's process and lost when that dies.
    """

    transport = "object_store"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._references: list[Any] = []

    def _location(self, num_bytes: int) -> list[Any]:
        import ray

        # Free the bucket before the previous one: its engines have loaded it.
        self._references = self._references[-1:]
        try:
            self._references.append(ray.put(self._buffers[0][:num_bytes].numpy()))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise TrainingError(
                f"cannot store {num_bytes} bytes of weights in Ray's object store; start the workers with a larger "
                "--object-store-memory",
                reason="disk_full",
            ) from error
        # A list keeps Ray from resolving the reference when the bucket is passed to an actor.
        return [self._references[-1]]


def fetch(bucket: WeightBucket) -> torch.Tensor:
    """The published buffer, uint8[num_bytes], read-only. Raises WeightsUnavailable when the learner has died."""
    import ray

    try:
        published = ray.get(bucket.location[0])
    except (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError) as error:
        raise WeightsUnavailable(f"weights version {bucket.version} was lost with its learner") from error
    return read_only_view(published)


TIMEOUT_S = 120.0
"""A member that does not join or answer within this time is dead; the group is then built again."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def open_store(address: str, port: int, member: int, size: int, timeout: timedelta) -> Store:
    """The store in which the members of a process group meet, served by member 0.

    torch's own listens on every interface, where any account of any host could write its keys. This one listens on
    `address` alone, and a group of one member needs none at all.
    """
    own = interface_to(address)
    listen_on("GLOO_SOCKET_IFNAME", LOOPBACK if size == 1 else own)
    # NCCL reads it once in a process, whose next group may have members on other hosts.
    listen_on("NCCL_SOCKET_IFNAME", own)
    if size == 1:
        return HashStore()
    if member > 0:
        return TCPStore(address, port, size, False, timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    descriptor = socket.create_server((address, port), family=family).detach()
    return TCPStore(address, port, size, True, timeout, master_listen_fd=descriptor)


class BroadcastGroup:
    """A process group separate from those of DeepSpeed and vLLM: NCCL on GPUs, Gloo on CPUs; learner rank 0 sends.
    Raises WeightsUnavailable when the group cannot be formed or a member is lost."""

    def __init__(self, address: str, port: int, member: int, size: int, device: torch.device) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        try:
            store = open_store(address, port, member, size, timeout)
            if device.type == "cuda":
                self._group: Any = _nccl_group(store, member, size, timeout)
            else:
                self._group = dist.ProcessGroupGloo(store, member, size, timeout)
        except (OSError, RuntimeError, dist.DistError) as error:
            raise WeightsUnavailable(f"the weight broadcast group could not be formed: {error}") from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send member 0's buffer, uint8[n] on the group's device, into every other member's."""
        try:
            self._group.broadcast(buffer, 0).wait()
        except (RuntimeError, dist.DistError) as error:
            raise WeightsUnavailable(f"a member of the weight broadcast group was lost: {error}") from error


def _nccl_group(store: Any, member: int, size: int, timeout: timedelta) -> Any:
    """A group whose `wait` returns once the data is there, and raises after `timeout` without it.

    Without TORCH_NCCL_BLOCKING_WAIT a thread of the group ends the process instead. The constructor reads the variable;
    groups of DeepSpeed and vLLM keep their own behaviour.
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


class BroadcastPublisher(Publisher):
    """Packs a bucket on the learner's device; `send`, called before the next one, broadcasts it."""

    transport = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._group: BroadcastGroup | None = None

    def join(self, address: str, port: int, size: int) -> None:
        """Open the group; returns when every member has joined."""
        self._group = BroadcastGroup(address, port, 0, size, self._device)

    def send(self, bucket: WeightBucket) -> None:
        assert self._group is not None, "join the broadcast group before the first bucket"
        self._group.broadcast(self.buffer(bucket))

    def _location(self, num_bytes: int) -> None:
        return None


def grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """`buffer`, or a copy of it with room for `size` bytes; doubled up to a full bucket to grow cheaply."""
    if buffer.numel() >= size:
        return buffer
    room = max(size, min(2 * buffer.numel(), WEIGHT_BUCKET_BYTES))
    larger = torch.empty(room, dtype=torch.uint8, device=buffer.device)
    larger[: buffer.numel()].copy_(buffer)
    return larger


STORAGE_DEVICE = 6
"""Argument of `rebuild_cuda_tensor` with the index of the device, as the process that exported the tensor counts."""


class CudaIpcPublisher(Publisher):
    """Packs each bucket into one of two buffers on this rank's GPU and exports a handle. Every rank publishes: a worker
    can map only memory of its own GPU."""

    transport = "cuda_ipc"
    num_buffers = 2

    def _location(self, num_bytes: int) -> dict[str, Any]:
        torch.cuda.synchronize(self._device)
        _, handle = reductions.reduce_tensor(self._buffers[self._turn])  # type: ignore[no-untyped-call]
        return {str(torch.cuda.get_device_properties(self._device).uuid): handle}


def open_handle(bucket: WeightBucket, device: torch.device) -> torch.Tensor:
    """The bucket's buffer on this worker's GPU, uint8[>= num_bytes]."""
    # The UUID of a GPU is the same in every process.
    handle: list[Any] = list(bucket.location[str(torch.cuda.get_device_properties(device).uuid)])
    # Processes number GPUs differently: the learner sees its own as 0, worker r of an engine as r.
    handle[STORAGE_DEVICE] = device.index
    buffer: torch.Tensor = reductions.rebuild_cuda_tensor(*handle)  # type: ignore[no-untyped-call]
    return buffer


def make_publisher(transport: Transport, device: torch.device) -> Publisher:
    """device: of the learner's rank."""
    if transport in ("nccl", "cuda_ipc"):
        return BroadcastPublisher(device) if transport == "nccl" else CudaIpcPublisher(device)
    return SharedMemoryPublisher() if transport == "shared_memory" else ObjectStorePublisher()
