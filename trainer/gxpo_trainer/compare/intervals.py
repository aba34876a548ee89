"""Confidence intervals of means, paired differences and ratios. numpy only; every random draw is seeded.

Which one to believe: runs differ by their seed, and the benchmark is a sample of problems. An interval over
seeds says whether another seed would agree, an interval over problems whether other problems would. With
the handful of seeds that a comparison has, the t-interval is the right one over seeds: a percentile
bootstrap cannot leave the range of its data and covers at most 1 − 2^(1−n) of the time (75 % at n = 3).
Over problems, of which there are hundreds, the paired bootstrap needs no assumption about their spread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
ResampleOver = Literal["problems", "seeds", "both"]

_CHUNK = 500
"""Resamples per block, so that memory stays at a few megabytes whatever the number of problems."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence bounds; the bounds are None where `num` observations cannot give any."""

    mean: float
    low: float | None
    high: float | None
    num: int

    def excludes(self, value: float) -> bool:
        """True when the bounds exist and `value` lies strictly outside them."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@functools.lru_cache(maxsize=1024)
def t_critical(level: float, degrees: int) -> float:
    """Two-sided critical value t with P(|T| < t) = level for Student's t, integer degrees of freedom.

    The probability is the finite series of Abramowitz & Stegun 26.7.3 and 26.7.4 in θ = atan(t/√ν), which
    is monotone in θ and inverted by bisection. Raises ValueError for a level outside (0, 1) or degrees < 1.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level = {level} is no confidence level; set it between 0 and 1, e.g. 0.95")
    if degrees < 1:
        raise ValueError(f"degrees = {degrees}: an interval over seeds needs at least two observations")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_inside(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _t_inside(theta: float, degrees: int) -> float:
    """P(|T| < √ν tan θ), as a finite sum in powers of cos θ."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2 == 1
    if degrees == 1:
        return 2 * theta / math.pi
    term = cosine if odd else 1.0
    total = term
    # Each term of the series follows from the one before: odd ν multiplies by 2j/(2j+1), even by (2j−1)/2j.
    for j in range(1, (degrees - 1) // 2 if odd else degrees // 2):
        term *= cosine * cosine * ((2 * j) / (2 * j + 1) if odd else (2 * j - 1) / (2 * j))
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def mean_interval(values: Sequence[float] | Floats, level: float = 0.95) -> Interval:
    """Mean of independent values with its t-interval: x̄ ± t·s/√n, s with n − 1.

    One value has no interval: bounds are None. Raises ValueError when there is none, or one is not finite.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values: an interval needs at least one run")
    if not np.isfinite(data).all():
        raise ValueError("a value is not finite; leave such runs out and say so")
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, None, None, 1)
    half = t_critical(level, data.size - 1) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half, int(data.size))


def ratio_interval(ratios: Sequence[float], level: float = 0.95) -> Interval:
    """Geometric mean of positive ratios with exp of the t-interval of their logarithms.

    A speed-up of 2 and one of 1/2 then average to 1, as they should. Raises ValueError for a ratio ≤ 0.
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
    over: ResampleOver = "problems",
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of mean(candidate − baseline), resampling what the two share.

    candidate, baseline: [num_seeds, num_problems] (or [num_problems]) scores; row i of both comes from the
    same seed, column j from the same problem. Problems are drawn with replacement, the same ones for both
    runs and all seeds; likewise seeds; `both` draws the two independently (Owen 2007's crossed bootstrap,
    which errs on the wide side). Because the statistic is linear, a resample is a vector of counts: the
    mean is countsₛ · D · counts_p / (num_seeds · num_problems) with D the matrix of differences.

    `num` of the result counts what was resampled (the smaller of the two for `both`); with only one of it
    the bounds are None. Raises ValueError for unequal shapes, an empty or non-finite score.
    """
    first, second = (np.atleast_2d(np.asarray(scores, dtype=np.float64)) for scores in (candidate, baseline))
    if first.shape != second.shape or first.ndim != 2:
        raise ValueError(f"scores of shape {first.shape} and {second.shape} cannot be paired; use the same problems")
    difference = first - second
    if difference.size == 0 or not np.isfinite(difference).all():
        raise ValueError("a score is missing or not finite; leave that problem out of both runs")
    num_seeds, num_problems = difference.shape
    mean = float(difference.mean())
    num = {"problems": num_problems, "seeds": num_seeds, "both": min(num_seeds, num_problems)}[over]
    if num < 2:
        return Interval(mean, None, None, num)
    generator = np.random.default_rng(seed)
    # Along one dimension alone, items of one value are one item: the same distribution with far fewer draws. Rounding
    # joins values that differ by the order in which they were summed.
    alone = {"problems": difference.mean(axis=0), "seeds": difference.mean(axis=1)}.get(over)
    values, counts = np.unique(np.empty(0) if alone is None else alone.round(12), return_counts=True)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, _CHUNK):
        size = min(_CHUNK, num_resamples - start)
        if alone is not None:
            means[start : start + size] = generator.multinomial(num, counts / num, size=size) @ values / num
        else:
            by_seed, by_problem = _counts(generator, num_seeds, size), _counts(generator, num_problems, size)
            means[start : start + size] = ((by_seed @ difference) * by_problem).sum(axis=1) / difference.size
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), num)


def shared_bootstrap(
    differences: npt.ArrayLike, *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> list[Interval]:
    """Percentile intervals of the means of many differences per problem, [num_differences, num_problems].

    As paired_bootstrap over problems of each row, with one set of drawn problems for all rows: each interval is what
    its row alone gives, and a hundred take little longer than one. Raises ValueError for an empty or non-finite score.
    """
    rows = np.asarray(differences, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise ValueError(f"differences of shape {rows.shape} are empty or not finite; leave such problems out")
    num_problems = rows.shape[1]
    if num_problems < 2:
        return [Interval(float(mean), None, None, num_problems) for mean in rows.mean(axis=1)]
    generator = np.random.default_rng(seed)
    means = np.empty((len(rows), num_resamples))
    for start in range(0, num_resamples, _CHUNK):
        size = min(_CHUNK, num_resamples - start)
        means[:, start : start + size] = rows @ _counts(generator, num_problems, size).T / num_problems
    tail = (1 - level) / 2
    bounds = np.quantile(means, [tail, 1 - tail], axis=1).T.tolist()
    return [
        Interval(float(mean), low, high, num_problems)
        for mean, (low, high) in zip(rows.mean(axis=1), bounds, strict=True)
    ]


def _counts(generator: np.random.Generator, num: int, size: int) -> Floats:
    """How often each of `num` items is drawn in `num` draws with replacement: [size, num]."""
    drawn = generator.integers(num, size=(size, num)) + num * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * num).reshape(size, num).astype(np.float64)
