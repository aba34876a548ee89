"""Downsampling that keeps minima and maxima, and evenly spaced choices. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def thin(values: npt.NDArray[np.float64], max_points: int) -> npt.NDArray[np.intp]:
    """Ascending indices of the values to keep, at most `max_points` (≥ 4).

    Keeps the first and the last point, and the minimum and maximum of each of the equal buckets between them. NaN is
    ignored; a bucket of only NaN keeps one point, so that the gap stays visible.
    """
    if max_points < 4:
        raise ValueError(f"max_points = {max_points}: at least 4 are needed")
    length = len(values)
    if length <= max_points:
        return np.arange(length)
    inner = values[1:-1]
    width = -(-len(inner) // ((max_points - 2) // 2))
    buckets = -(-len(inner) // width)
    padded = np.full(buckets * width, np.nan)
    padded[: len(inner)] = inner
    grid = padded.reshape(buckets, width)
    gaps = np.isnan(grid)
    begin = np.arange(buckets) * width
    lowest = begin + np.where(gaps, np.inf, grid).argmin(axis=1)
    highest = begin + np.where(gaps, -np.inf, grid).argmax(axis=1)
    pairs = np.stack([np.minimum(lowest, highest), np.maximum(lowest, highest)], axis=1)
    twice = pairs[:, 0] == pairs[:, 1]
    kept = pairs.ravel()[~np.stack([np.zeros_like(twice), twice], axis=1).ravel()] + 1
    return np.concatenate([[0], kept, [length - 1]])


def spread(length: int, max_points: int) -> npt.NDArray[np.intp]:
    """Ascending indices of at most `max_points` (≥ 2) of `length` points: evenly spaced, with both ends."""
    if length <= max_points:
        return np.arange(length)
    return np.linspace(0, length - 1, max_points).round().astype(np.intp)
