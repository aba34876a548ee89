"""Tensor checksums that are equal on CPU and GPU and in every process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

_CHUNK = 1 << 19  # words


def checksum(tensor: torch.Tensor) -> int:
    """Σ word_i · w_i mod 2^64 over the tensor's row-major bits as 64-bit words; w_i odd, pseudo-random in i.

    Multiplication by an odd weight is a bijection, so a change within one word is always detected; any other change
    is missed with a probability of about 2^-64. +0.0 and -0.0 have different bits: see `without_signed_zeros`.
    """
    words = _words(tensor)
    weights = _position_weights(words.device)
    total = 0
    for chunk, start in enumerate(range(0, words.numel(), _CHUNK)):
        part = words[start : start + _CHUNK]
        scale = weights[: part.numel()]
        # CUDA has no integer dot product; on a CPU it is ten times as fast as multiply and sum.
        total += int((part * scale).sum() if part.is_cuda else torch.dot(part, scale)) * _chunk_weight(chunk)
    return total % (1 << 64)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor` as int64[...], zero-padded to whole words."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)


def without_signed_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with -0.0 replaced by +0.0, as published: reading back a packed matrix loses the sign of zeros."""
    return tensor.detach() + 0.0 if tensor.is_floating_point() else tensor.detach()


@cache
def _position_weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights of the positions of one chunk; equal on every device and machine."""
    weights = _splitmix64(np.arange(1, _CHUNK + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


@cache
def _chunk_weight(chunk: int) -> int:
    return int(_splitmix64(np.uint64(_CHUNK + 1 + chunk))) | 1


def _splitmix64(counter: Any) -> Any:
    """Output of the SplitMix64 generator for each uint64 counter (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        z = counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
