"""Sizes of parameters that ZeRO-3 may have partitioned."""

from __future__ import annotations

from torch import Tensor


def num_elements(parameter: Tensor) -> int:
    """Elements of the whole parameter; a partitioned one is empty, but knows its size."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
