"""Weights on one host: two buffers under /dev/shm that take turns."""

from __future__ import annotations

import fcntl
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

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.sync.manifest import TensorEntry, WeightManifest, entry_of, view_of

SHM_ROOT = Path("/dev/shm")
_PREFIX = "gxpo-weights-"
_ALIGNMENT = 64


class SharedMemoryPublisher:
    """Learner side on one host: writes each version into one of two buffers in a private directory.

    Two buffers take turns, so a sampler that still maps the last version never reads half of the next. The
    directory (mode 0700) goes with `close`, at exit, or, after a kill, when the next publisher starts: the
    owner holds a file lock that the kernel releases at death, so a directory without one is nobody's.

    dtype: what is published; None keeps each tensor's own. It must be the sampler's.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, root: Path = SHM_ROOT) -> None:
        sweep(root)
        self._dtype = dtype
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        lock = os.open(fresh / "owner.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed only once it is locked: a sweep looks at the final name alone.
        self.directory = fresh.rename(root / fresh.name.removeprefix("."))
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._published: list[Any] = [None, None]
        self._turn = 0
        self._close = weakref.finalize(self, _remove, self.directory, lock)

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy the tensors (transformers' names, any device) into shared memory, one at a time as they come.

        A tensor need only live until the next one is asked for. Raises TrainingError (disk_full).
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
        """Share of the elements of `manifest`, the version just published, that differ from the version before it.

        None when that was the first, or had another layout.
        """
        if self._published[0] != self._published[1]:
            return None
        new, old = self._buffers[self._turn], self._buffers[self._turn ^ 1]
        changed = 0
        for entry in manifest.tensors:
            place = getattr(torch, entry.dtype), entry.shape, entry.offset
            changed += int((view_of(new, *place) != view_of(old, *place)).sum())
        return changed / sum(math.prod(entry.shape) for entry in manifest.tensors)

    def newest(self, manifest: WeightManifest) -> torch.Tensor:
        """uint8[num_bytes], the version just published; written over by the next but one."""
        return self._buffers[self._turn][: manifest.num_bytes]

    def close(self) -> None:
        """Remove the directory; samplers that map a buffer keep it until they let go."""
        self._close()

    def _path(self) -> Path:
        return self.directory / f"buffer-{self._turn}"

    def _buffer(self, size: int) -> torch.Tensor:
        """This turn's buffer as uint8[>= size]; it grows, keeping what was written, until all tensors have passed."""
        buffer = self._buffers[self._turn]
        if buffer.numel() >= size:
            return buffer
        descriptor = os.open(self._path(), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Reserved at once: writing to a full tmpfs through a map would be a SIGBUS, not an error.
            os.posix_fallocate(descriptor, 0, size)
            buffer = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except OSError as error:
            message = (
                f"Cannot allocate a weight buffer of {size / 2**30:.2g} GiB in {self.directory.parent} "
                f"({error.strerror}), which must hold two versions of the weights beside Ray's object store; raise "
                'shm_size (RAY_SHM_SIZE in docker-compose.yml), or halve fp32 weights with rollout.dtype = "bfloat16". '
                'placement.weight_transport = "object_store" needs the buffers as well'
            )
            raise TrainingError(message, reason="disk_full") from error
        finally:
            os.close(descriptor)
        self._buffers[self._turn] = buffer
        return buffer


def sweep(root: Path = SHM_ROOT) -> list[Path]:
    """Remove the directories of publishers that died without closing; returns what was removed."""
    removed = []
    for directory in root.glob(f"{_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # closed by its owner in this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _remove(directory, lock)
        removed.append(directory)
    return removed


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
