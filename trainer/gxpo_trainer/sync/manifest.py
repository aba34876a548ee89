"""What was published, and what a sync reports. Pure data, and the views that it describes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.sync.checksums import checksum


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One published tensor: transformers' name, dtype and shape, place in the buffer (bytes), checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What was published as `version`, and where: in `buffer`, a shared-memory file; in `reference`, a Ray object
    of uint8[num_bytes]; or in neither, when NCCL has delivered it."""

    version: int
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    buffer: str | None
    reference: Any = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync on the sampler's side, times in seconds.

    num_checked counts comparisons (a tied head is one of its own); unreadable are the published names that the
    sampler cannot show again, for which only the log-probability gap speaks.
    """

    version: int
    num_bytes: int
    num_checked: int
    unreadable: tuple[str, ...]
    load_s: float
    verify_s: float
    total_s: float
    peak_bytes: int


def view_of(whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    return whole[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> TensorEntry:
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, checksum(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
