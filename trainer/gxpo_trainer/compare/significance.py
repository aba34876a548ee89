"""Tests of paired differences over few seeds: p-values, correction for several arms, and what could have been seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gxpo_trainer.compare.intervals import t_critical


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of Student's t for a mean of 0; None for fewer than two differences or equal ones."""
    from scipy.special import stdtr

    data = np.asarray(differences, dtype=np.float64)
    if data.size < 2 or np.ptp(data) == 0:
        return None
    t = abs(float(data.mean())) / (float(data.std(ddof=1)) / math.sqrt(data.size))
    return float(2 * stdtr(data.size - 1, -t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm (1979): the k-th smallest of m times m − k + 1, made monotone and at most 1."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable_difference(differences: Sequence[float], *, level: float = 0.95, power: float = 0.8) -> float | None:
    """Smallest true difference that this many seeds of this spread show with probability `power`.

    (t_level + t_power) · s/√n, with the one-sided t of `power`; the usual approximation to the non-central t. None for
    fewer than two differences.
    """
    data = np.asarray(differences, dtype=np.float64)
    if data.size < 2:
        return None
    degrees = data.size - 1
    factor = t_critical(level, degrees) + t_critical(2 * power - 1, degrees)
    return float(factor * data.std(ddof=1) / math.sqrt(data.size))
