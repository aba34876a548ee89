"""Weights in transit: a published version is a sequence of buckets, each a flat buffer and a table of its tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.config.transport import Transport
from gxpo_trainer.sync.checksums import checksum

BUCKET_BYTES = 512 * 2**20
"""Largest bucket. Two are in use at a time: one is filled while the engines load the other."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Rows [first_row, first_row + shape[0]) of a published tensor.

    name: transformers' name, or PEFT's for a LoRA matrix. offset: in the bucket's buffer, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Part `index` of a published version.

    location: of the buffer of uint8[num_bytes]. shared_memory: a path; object_store: a Ray object reference; cuda_ipc:
    handles by device; nccl: None, because the buffer is broadcast.
    """

    version: int
    index: int
    last: bool
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    transport: Transport
    location: Any = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one sync on one engine.

    num_checked: comparisons made in all workers (a tied head counts separately). Times in seconds, of the slowest
    worker.
    """

    version: int
    num_bytes: int
    num_checked: int
    load_s: float
    verify_s: float
    peak_bytes: int


class BucketPacker:
    """Packs a stream of named tensors into buckets of at most `capacity` bytes.

    A tensor larger than a bucket is split by rows. The stream advances only when a tensor has been copied completely,
    so it may reuse a tensor's storage for the next one, and every rank of a collective stream advances in step.

    dtype: of the published values, None keeps each tensor's own.
    """

    def __init__(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None = None,
        capacity: int = BUCKET_BYTES,
    ) -> None:
        self._stream, self._dtype, self._capacity = named_tensors, dtype, capacity
        self._current = next(self._stream, None)
        self._row = 0

    @property
    def empty(self) -> bool:
        """Whether everything has been packed."""
        return self._current is None

    def pack(self, allocate: Callable[[int], torch.Tensor] | None) -> tuple[tuple[TensorEntry, ...], int]:
        """Copy the next tensors; returns their entries and the bytes used.

        allocate(n): the bucket's buffer, uint8[>= n], with its first bytes kept. None: advance without copying, on
        ranks that do not publish.
        """
        entries: list[TensorEntry] = []
        used = 0
        while self._current is not None:
            name, tensor = self._current
            rows = self._rows_that_fit(tensor, used)
            if not rows:
                break
            part = tensor.detach()[self._row : self._row + rows] if tensor.ndim else tensor.detach()
            dtype = self._dtype or tensor.dtype
            start, used = used, _aligned(used + part.numel() * dtype.itemsize)
            if allocate is not None:
                view = view_of(allocate(used), dtype, tuple(part.shape), start)
                view.copy_(part)
                if dtype.is_floating_point:
                    view.add_(0.0)  # see `without_signed_zeros`
                entries.append(
                    TensorEntry(name, dtype_name(dtype), tuple(part.shape), start, checksum(view), self._row)
                )
            self._row += rows
            if self._row >= _num_rows(tensor):
                self._current, self._row = next(self._stream, None), 0
        return tuple(entries), used

    def close(self) -> None:
        """Abandon the stream; a collective one is closed on every rank."""
        self._current = None
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()

    def _rows_that_fit(self, tensor: torch.Tensor, used: int) -> int:
        """Rows of `tensor` for this bucket; 0 closes it. A whole tensor is split only if it exceeds every bucket."""
        left = _num_rows(tensor) - self._row
        row_bytes = max(1, tensor.numel() // max(1, _num_rows(tensor)) * (self._dtype or tensor.dtype).itemsize)
        room = self._capacity - used
        if left * row_bytes <= room:
            return left
        if used and left * row_bytes <= self._capacity:
            return 0
        # A row larger than a bucket gets one of its own; `room` is then below 0 for what follows.
        return max(0 if used else 1, room // row_bytes)


def view_of(whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor at `offset` bytes of a uint8 buffer, without a copy."""
    return whole[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def tensors_of(bucket: WeightBucket, buffer: torch.Tensor) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Each entry and a view of its tensor."""
    for entry in bucket.tensors:
        yield entry, view_of(buffer, getattr(torch, entry.dtype), entry.shape, entry.offset)


def read_only_view(buffer: Any) -> torch.Tensor:
    """uint8[num_bytes] over a read-only buffer, without a copy and without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _num_rows(tensor: torch.Tensor) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 1


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
