"""A checksum of a tensor's bits that two processes can compare, on a CPU or a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

_CHUNK = 1 << 19  # words


def checksum(tensor: torch.Tensor) -> int:
    """Σ word_i · w_i mod 2^64 over the tensor's bits, row by row, as 64-bit words; w_i odd, pseudo-random in i.

    Multiplying by an odd weight is a bijection, so a change within one word always shows; any other change, a
    shift or an exchange of elements is missed with probability about 2^-64. Zeros of either sign have different
    bits: see `without_signed_zeros`.
    """
    words = _words(tensor)
    weights = _position_weights(words.device)
    total = 0
    for chunk, start in enumerate(range(0, words.numel(), _CHUNK)):
        part = words[start : start + _CHUNK]
        # CUDA has no integer dot product; on a CPU it is ten times as fast as multiply and sum.
        if part.is_cuda:
            value = int((part * weights[: part.numel()]).sum())
        else:
            value = int(torch.dot(part, weights[: part.numel()]))
        total += value * _chunk_weight(chunk)
    return total % (1 << 64)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor` as int64[...], the last word filled up with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)


def without_signed_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with -0.0 turned into +0.0 and everything else as it was.

    Published tensors are such, because a packed matrix does not give the sign of a zero back.
    """
    return tensor.detach() + 0.0 if tensor.is_floating_point() else tensor.detach()


@cache
def _position_weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights of the positions of one chunk, made once a device (the same on every device and machine)."""
    weights = _splitmix64(np.arange(1, _CHUNK + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


@cache
def _chunk_weight(chunk: int) -> int:
    return int(_splitmix64(np.uint64(_CHUNK + 1 + chunk))) | 1


def _splitmix64(counter: Any) -> Any:
    """The SplitMix64 generator's output for each uint64 counter (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        z = counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
