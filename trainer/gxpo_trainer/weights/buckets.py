"""Weights in transit: a published version is a sequence of buckets, each a flat buffer and a table of its tensors.

The table has a checksum of each tensor, equal on CPU and GPU and in every process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from gxpo_trainer.config.engines import WEIGHT_BUCKET_BYTES, Transport

PEFT_PREFIX, ADAPTER_WEIGHTS = "base_model.model.", "adapter_model.safetensors"
"""Of an adapter in PEFT's format: what precedes the names of a model's tensors, and the file of its own."""
_CHUNK = 1 << 19  # words


def checksum(tensor: torch.Tensor) -> int:
    """Σ word_i · w_i mod 2^64 over the tensor's row-major bits as 64-bit words; w_i odd, pseudo-random in i (Philox).

    Multiplication by an odd weight is a bijection, so a change within one word is always detected; any other change
    is missed with a probability of about 2^-64. +0.0 and -0.0 have different bits: see `without_signed_zeros`.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    words, weights = flat.view(torch.int64), _position_weights(flat.device)
    total = 0
    for chunk, start in enumerate(range(0, words.numel(), _CHUNK)):
        part = words[start : start + _CHUNK]
        scale = weights[: part.numel()]
        # CUDA has no integer dot product; on a CPU it is ten times as fast as multiply and sum.
        total += int((part * scale).sum() if part.is_cuda else torch.dot(part, scale)) * _chunk_weight(chunk)
    return total % (1 << 64)


def without_signed_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with -0.0 replaced by +0.0, as published: reading back a packed matrix loses the sign of zeros."""
    return tensor.detach() + 0.0 if tensor.is_floating_point() else tensor.detach()


@cache
def _position_weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights of the positions of one chunk; equal on every device and machine."""
    weights = np.random.Philox(key=0).random_raw(_CHUNK) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


@cache
def _chunk_weight(chunk: int) -> int:
    return int(np.random.Philox(key=1 + chunk).random_raw()) | 1


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Rows [first_row, first_row + shape[0]) of a published tensor.

    name: transformers' name, or PEFT's for a LoRA matrix. offset: in the bucket's buffer, in bytes.
    """

    name: str
    dtype: torch.dtype
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

    num_checked: comparisons made in all workers (a tied head counts separately). Seconds of the slowest worker.
    changed_fraction: of the published weights, None for the first version.
    """

    num_checked: int
    load_s: float
    verify_s: float
    peak_bytes: int
    changed_fraction: float | None = None


class BucketPacker:
    """Packs a stream of named tensors into buckets of at most `capacity` bytes; a larger tensor is split by rows.

    The stream advances only when a tensor has been copied completely, so it may reuse a tensor's storage for the next
    one, and every rank of a collective stream advances in step. dtype: of the published values, None keeps their own.
    """

    def __init__(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None = None,
        capacity: int = WEIGHT_BUCKET_BYTES,
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
            start, used = used, -(-(used + part.numel() * dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
            if allocate is not None:
                view = _view(allocate(used), dtype, part.shape, start)
                view.copy_(part)
                if dtype.is_floating_point:
                    view.add_(0.0)  # see `without_signed_zeros`
                entries.append(TensorEntry(name, dtype, tuple(part.shape), start, checksum(view), self._row))
            self._row += rows
            if self._row >= _num_rows(tensor):
                self._current, self._row = next(self._stream, None), 0
        return tuple(entries), used

    def close(self) -> None:
        """Abandon the stream; a collective one is closed on every rank."""
        self._current = None
        if isinstance(self._stream, Generator):
            self._stream.close()

    def _rows_that_fit(self, tensor: torch.Tensor, used: int) -> int:
        """Rows of `tensor` for this bucket; 0 closes it. A whole tensor is split only if it exceeds every bucket."""
        remaining = _num_rows(tensor) - self._row
        row_bytes = max(1, tensor.numel() // max(1, _num_rows(tensor)) * (self._dtype or tensor.dtype).itemsize)
        room = self._capacity - used
        if remaining * row_bytes <= room:
            return remaining
        if used and remaining * row_bytes <= self._capacity:
            return 0
        # A row larger than a bucket gets one of its own; `room` is then below 0 for what follows.
        return max(0 if used else 1, room // row_bytes)


def _view(whole: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
    """The tensor at `offset` bytes of a uint8 buffer, without a copy."""
    return whole[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def tensors_of(bucket: WeightBucket, buffer: torch.Tensor) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Each entry and a view of its tensor."""
    for entry in bucket.tensors:
        yield entry, _view(buffer, entry.dtype, entry.shape, entry.offset)


def read_only_view(buffer: Any) -> torch.Tensor:
    """uint8[num_bytes] over a read-only buffer, without a copy and without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _num_rows(tensor: torch.Tensor) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 1


MOST_SAMPLED = 1 << 23
"""Weights that are compared, evenly spaced; all of them up to this number."""


class ChangeMeter:
    """Compares a sample of each version's elements with the version before."""

    def __init__(self, num_elements: int) -> None:
        self._stride = -(-num_elements // MOST_SAMPLED)
        self._previous: dict[tuple[str, int], torch.Tensor] = {}
        self._present: dict[tuple[str, int], torch.Tensor] = {}
        self._version: int | None = None
        self._changed = self._compared = 0

    def add(self, bucket: WeightBucket, buffer: torch.Tensor) -> float | None:
        """Compare a bucket. After the last one: the fraction of elements that changed, None for the first version."""
        if bucket.index == 0:
            if bucket.version != self._version:  # else it is published again
                self._previous, self._version = self._present, bucket.version
            self._present = {}
            self._changed = self._compared = 0
        for entry, tensor in tensors_of(bucket, buffer):
            key, sampled = (entry.name, entry.first_row), tensor.reshape(-1)[:: self._stride].clone()
            before = self._previous.get(key)
            if before is not None and before.shape == sampled.shape:
                self._changed += int((before != sampled).sum())
                self._compared += sampled.numel()
            self._present[key] = sampled
        if not bucket.last:
            return None
        return self._changed / self._compared if self._compared else None
