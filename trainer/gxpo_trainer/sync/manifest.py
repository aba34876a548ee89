"""Manifest of a published version, report of a sync, and tensor views into a buffer."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.sync.checksums import checksum


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One published tensor: transformers' name, dtype, shape, offset in the buffer (bytes), checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Contents and location of a published version.

    buffer: path of a shared-memory file; reference: a Ray object of uint8[num_bytes]. Both are None for NCCL, which
    has delivered the tensors already.
    """

    version: int
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    buffer: str | None
    reference: Any = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one sync on the sampler, times in seconds.

    num_checked: comparisons made (a tied head counts separately). unreadable: published names that the sampler cannot
    read back; only the log-probability gap covers them.
    """

    version: int
    num_bytes: int
    num_checked: int
    unreadable: tuple[str, ...]
    load_s: float
    verify_s: float
    total_s: float
    peak_bytes: int


def read_only_view(buffer: Any) -> torch.Tensor:
    """uint8[num_bytes] over a read-only buffer, without a copy and without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)


def view_of(whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor at `offset` bytes of a uint8 buffer, without a copy."""
    return whole[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> TensorEntry:
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, checksum(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
