"""Weight transport on one host: two alternating buffers under /dev/shm."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.sync.manifest import TensorEntry, WeightManifest, entry_of, view_of

SHM_ROOT = Path("/dev/shm")
_PREFIX = "gxpo-weights-"
_ALIGNMENT = 64


class SharedMemoryPublisher:
    """Writes each version into one of two alternating buffers in a private directory (mode 0700).

    A sampler that still maps the previous version thus never reads parts of the next. `close` or process exit removes
    the directory; after a kill the next publisher does, because the kernel has released the owner's file lock.

    dtype: the published dtype, which must be the sampler's; None keeps each tensor's own.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, root: Path = SHM_ROOT) -> None:
        remove_stale_directories(root)
        self._dtype = dtype
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        lock = _owner_lock(fresh)
        lock.acquire()
        # Renamed after it is locked: `remove_stale_directories` considers final names only.
        self.directory = fresh.rename(root / fresh.name.removeprefix("."))
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._published: list[Any] = [None, None]
        self._turn = 0
        self._close = weakref.finalize(self, _remove, self.directory, lock)

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy the tensors (transformers' names, any device) into shared memory, one at a time.

        The iterable may reuse a tensor's storage for the next one. Raises TrainingError (disk_full).
        """
        self._turn ^= 1
        entries: list[TensorEntry] = []
        size = 0
        for name, tensor in named_tensors:
            dtype = self._dtype or tensor.dtype
            start, size = size, size + -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            view = view_of(self._buffer(size), dtype, tuple(tensor.shape), start)
            view.copy_(tensor.detach())
            if dtype.is_floating_point:
                view.add_(0.0)  # see `without_signed_zeros`
            entries.append(entry_of(name, view, start))
        self._published[self._turn] = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        return WeightManifest(version, tuple(entries), size, str(self._path()))

    def changed_fraction(self, manifest: WeightManifest) -> float | None:
        """Fraction of elements of the just published `manifest` that differ from the previous version.

        None for the first version and after a change of layout.
        """
        if self._published[0] != self._published[1]:
            return None
        new, old = self._buffers[self._turn], self._buffers[self._turn ^ 1]
        changed = 0
        for entry in manifest.tensors:
            layout = getattr(torch, entry.dtype), entry.shape, entry.offset
            changed += int((view_of(new, *layout) != view_of(old, *layout)).sum())
        return changed / sum(math.prod(entry.shape) for entry in manifest.tensors)

    def newest(self, manifest: WeightManifest) -> torch.Tensor:
        """The just published version, uint8[num_bytes]; overwritten by the next but one."""
        return self._buffers[self._turn][: manifest.num_bytes]

    def close(self) -> None:
        """Remove the directory; the memory is freed when samplers have unmapped it."""
        self._close()

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
                f"Cannot allocate a weight buffer of {size / 2**30:.2g} GiB in {self.directory.parent} "
                f"({error.strerror}), which must hold two versions of the weights in addition to Ray's object store; "
                "raise shm_size (RAY_SHM_SIZE in docker-compose.yml), or halve fp32 weights with "
                'rollout.dtype = "bfloat16". placement.weight_transport = "object_store" needs the buffers as well'
            )
            raise TrainingError(message, reason="disk_full") from error
        finally:
            os.close(descriptor)
        self._buffers[self._turn] = buffer
        return buffer


def remove_stale_directories(root: Path = SHM_ROOT) -> list[Path]:
    """Remove and return the directories of publishers that died without closing."""
    removed = []
    for directory in root.glob(f"{_PREFIX}*"):
        lock = _owner_lock(directory)
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            lock.acquire()
        except (Timeout, FileNotFoundError):
            continue  # in use, or removed by its owner just now
        _remove(directory, lock)
        removed.append(directory)
    return removed


def _owner_lock(directory: Path) -> FileLock:
    return FileLock(directory / "owner.lock", mode=0o600, blocking=False, thread_local=False)


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()
