"""Weight transport on one host: two alternating buckets under /dev/shm."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from gxpo_trainer.cluster.owned_directory import OwnedDirectory
from gxpo_trainer.errors import TrainingError, WeightsUnavailable
from gxpo_trainer.sync.buckets import BucketPacker, WeightBucket, read_only_view

SHM_ROOT = Path("/dev/shm")
PREFIX = "gxpo-weights-"


class SharedMemoryPublisher:
    """Writes buckets into two alternating files in a private directory (mode 0700).

    An engine that still loads a bucket thus never reads parts of the next.
    """

    def __init__(self, root: Path = SHM_ROOT) -> None:
        self._owned = OwnedDirectory(root, PREFIX)
        self.directory = self._owned.path
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def publish(self, packer: BucketPacker, version: int, index: int) -> WeightBucket:
        """Copy the next tensors of `packer` (any device) into shared memory. Raises TrainingError (disk_full)."""
        self._turn ^= 1
        entries, size = packer.pack(self._buffer)
        return WeightBucket(version, index, packer.empty, entries, size, "shared_memory", str(self._path()))

    def buffer(self, bucket: WeightBucket) -> torch.Tensor:
        """The newest bucket, uint8[num_bytes]; overwritten by the next but one."""
        return self._buffers[self._turn][: bucket.num_bytes]

    def store(self, content: torch.Tensor) -> str:
        """Copy a received buffer into shared memory; its path. For engines that received it by another transport."""
        self._turn ^= 1
        self._buffer(content.numel())[: content.numel()].copy_(content)
        return str(self._path())

    def close(self) -> None:
        """Remove the directory; the memory is freed when the engines have unmapped it."""
        self._owned.close()

    def _path(self) -> Path:
        return self.directory / f"buffer-{self._turn}"

    def _buffer(self, size: int) -> torch.Tensor:
        """The current buffer as uint8[>= size], grown as needed with its contents kept."""
        buffer = self._buffers[self._turn]
        if buffer.numel() >= size:
            return buffer
        descriptor = os.open(self._path(), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
        self._maps: dict[tuple[int, int, int], torch.Tensor] = {}

    def read(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's buffer, uint8[>= num_bytes], read-only. Raises WeightsUnavailable when the file is gone."""
        try:
            descriptor = os.open(bucket.location, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise WeightsUnavailable(
                f"weights version {bucket.version} was published in {bucket.location}, which does not exist on this "
                "host: either the publisher has closed, or learner and sampler are on different hosts"
            ) from error
        try:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino, status.st_size)
            if key not in self._maps:
                self._maps = dict(list(self._maps.items())[-1:])
                mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
                self._maps[key] = read_only_view(mapped)
            return self._maps[key]
        finally:
            os.close(descriptor)
