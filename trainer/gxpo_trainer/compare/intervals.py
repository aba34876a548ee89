"""Confidence intervals of means, paired differences and ratios. Every random draw is seeded.

Runs differ by their seed, and a benchmark is a sample of problems, so there are two kinds of intervals: over seeds
(would another seed agree?) and over problems (would other problems agree?). Over the few seeds of a comparison the
t-interval is used: a percentile bootstrap cannot exceed the range of its data and covers at most 1 − 2^(1−n) of the
time (75% at n = 3). Over hundreds of problems the paired bootstrap needs no assumption about their distribution.
Paired differences over seeds also have p-values, corrected for several arms, and a smallest difference that shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CHUNK = 500
"""Resamples per block, which bounds memory to a few megabytes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence bounds, which are None when `num` observations are too few."""

    mean: float
    low: float | None
    high: float | None
    num: int

    def excludes(self, value: float) -> bool:
        """Whether the bounds exist and `value` lies strictly outside them."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def t_critical(level: float, degrees: int) -> float:
    """Two-sided critical value t with P(|T| < t) = level for Student's t with `degrees` degrees of freedom.

    Raises ValueError for a level outside (0, 1) or degrees < 1.
    """
    # Imported here to keep `gxpo --help` fast; scipy.special is a tenth of scipy.stats, which calls the same function.
    from scipy.special import stdtrit

    if not 0.0 < level < 1.0:
        raise ValueError(f"level = {level} is not a confidence level; set it between 0 and 1, e.g. 0.95")
    if degrees < 1:
        raise ValueError(f"degrees = {degrees}: an interval over seeds needs at least two observations")
    return float(stdtrit(degrees, (1 + level) / 2))


def mean_interval(values: Sequence[float] | Floats, level: float = 0.95) -> Interval:
    """Mean of independent values with its t-interval: x̄ ± t·s/√n, s with n − 1.

    The bounds are None for a single value. Raises ValueError for no value or one that is not finite.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values: an interval needs at least one run")
    if not np.isfinite(data).all():
        raise ValueError("a value is not finite; exclude that run")
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, None, None, 1)
    half = t_critical(level, data.size - 1) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half, int(data.size))


def ratio_interval(ratios: Sequence[float], level: float = 0.95) -> Interval:
    """Geometric mean of positive ratios with exp of the t-interval of their logarithms.

    Speed-ups of 2 and 1/2 average to 1. Raises ValueError for a ratio ≤ 0.
    """
    if any(not ratio > 0 for ratio in ratios):
        raise ValueError(f"ratios = {list(ratios)}: a geometric mean needs positive ratios")
    logs = mean_interval([math.log(ratio) for ratio in ratios], level)
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Interval(math.exp(logs.mean), low, high, logs.num)


def paired_bootstrap(
    candidate: npt.ArrayLike,
    baseline: npt.ArrayLike,
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of mean(candidate − baseline), resampling problems.

    candidate, baseline: scores [num_problems], entry j of both from the same problem. Raises ValueError for unequal
    shapes, an empty or non-finite score.
    """
    first, second = (np.asarray(scores, dtype=np.float64) for scores in (candidate, baseline))
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"scores of shape {first.shape} and {second.shape} cannot be paired; use the same problems")
    return shared_bootstrap([first - second], level=level, num_resamples=num_resamples, seed=seed)[0]


def shared_bootstrap(
    differences: npt.ArrayLike, *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> list[Interval]:
    """Percentile intervals of the row means of differences, [num_differences, num_problems], resampling problems.

    All rows share the drawn problems, which does not change a row's interval and makes many rows nearly as fast as
    one. Raises ValueError for an empty or non-finite score.
    """
    rows = np.asarray(differences, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise ValueError(f"differences of shape {rows.shape} are empty or not finite; exclude such problems")
    num_problems = rows.shape[1]
    if num_problems < 2:
        return [Interval(float(mean), None, None, num_problems) for mean in rows.mean(axis=1)]
    generator = np.random.default_rng(seed)
    means = np.empty((len(rows), num_resamples))
    for start in range(0, num_resamples, _CHUNK):
        size = min(_CHUNK, num_resamples - start)
        # How often each problem is drawn, [size, num_problems].
        drawn = generator.integers(num_problems, size=(size, num_problems)) + num_problems * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * num_problems).reshape(size, -1).astype(np.float64)
        means[:, start : start + size] = rows @ counts.T / num_problems
    tail = (1 - level) / 2
    bounds = np.quantile(means, [tail, 1 - tail], axis=1).T.tolist()
    return [
        Interval(float(mean), low, high, num_problems)
        for mean, (low, high) in zip(rows.mean(axis=1), bounds, strict=True)
    ]


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
