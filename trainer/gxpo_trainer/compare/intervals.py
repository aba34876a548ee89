"""Intervals and tests of means, differences and ratios over seeds. Pure, on SciPy.

Runs differ by their seed, and a benchmark is a sample of problems, so there are two kinds of intervals. Over seeds:
would another seed agree? Over problems, *conditional* on the seeds that ran: would other problems agree, of these same
policies? The conditional ones say nothing about other seeds and cover too little once seeds vary. Both are t-intervals
of one value a seed or a problem: a percentile bootstrap over three to eight seeds covers at most 1 − 2^(1−n).

A difference is tested by the paired t-test over shared seeds and by Welch's over all. That a difference is not shown
does not show that there is none: for that, two one-sided tests (TOST, Schuirmann 1987) reject a loss or gain of a
margin that was named beforehand. Several comparisons are corrected by Holm (1979), tests and equivalence tests alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MARGIN = 0.01
"""Equivalence margin where none was registered: one point of accuracy."""
ALPHA = 0.05
"""Level of every test, after correction."""
LEVEL = 0.95
"""Confidence level of every interval."""


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


def mean_interval(values: Sequence[float] | Floats) -> Interval:
    """Mean of independent values with its t-interval: x̄ ± t·s/√n, s with n − 1.

    The bounds are None for a single value. Raises ValueError for no or infinite values.
    """
    # Imported here to keep `gxpo --help` fast; scipy.special is a tenth of scipy.stats, and bands call this often.
    from scipy.special import stdtrit

    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("no values: an interval needs at least one run")
    if not np.isfinite(data).all():
        raise ValueError("a value is not finite; exclude that run")
    mean = float(data.mean())
    if data.size < 2:
        return Interval(mean, None, None, 1)
    half = float(stdtrit(data.size - 1, (1 + LEVEL) / 2)) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half, int(data.size))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of positive ratios with exp of the t-interval of their logarithms.

    Speed-ups of 2 and 1/2 average to 1. Raises ValueError for a ratio ≤ 0.
    """
    if any(not ratio > 0 for ratio in ratios):
        raise ValueError(f"ratios = {list(ratios)}: a geometric mean needs positive ratios")
    logs = mean_interval([math.log(ratio) for ratio in ratios])
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Interval(math.exp(logs.mean), low, high, logs.num)


@dataclass(frozen=True, slots=True)
class Contrast:
    """A group's values against the baseline's, one a seed.

    own, baseline: means over all seeds. difference: paired by shared seed. spread: standard deviation of the paired
    differences. p_value: of the paired t-test, adjusted: after Holm. welch: of Welch's t-test over all seeds, without
    pairing. equivalence: of TOST, paired, for |difference| < margin, after Holm once corrected. over_problems:
    difference over problems, conditional on these seeds. None where seeds or a spread are missing.
    """

    own: Interval
    baseline: Interval
    difference: Interval
    margin: float
    spread: float | None
    p_value: float | None
    welch: float | None
    equivalence: float | None
    adjusted: float | None = None
    over_problems: Interval | None = None

    @property
    def shown(self) -> bool:
        """Whether the difference is shown, after Holm's correction."""
        return self.adjusted is not None and self.adjusted < ALPHA

    @property
    def equivalent(self) -> bool:
        return self.equivalence is not None and self.equivalence < ALPHA

    @property
    def verdict(self) -> str:
        """`lower`, `equivalent within 1 point`, `not shown equivalent`, …: what the tests carry and never more."""
        within = f"equivalent within {100 * self.margin:g} point{'s' if self.margin != 0.01 else ''}"
        words = [("higher" if self.difference.mean > 0 else "lower")] if self.shown else []
        words += [within] if self.equivalent else [] if self.shown else ["not shown equivalent"]
        return ", ".join(words)


def contrast(own: Mapping[int, float], baseline: Mapping[int, float], margin: float = MARGIN) -> Contrast | None:
    """Compare values by seed; None without a shared seed."""
    # Not scipy.stats, whose tests take a millisecond each: a comparison of many runs makes hundreds.
    from scipy.special import stdtr

    shared = [seed for seed in own if seed in baseline]
    if not shared:
        return None
    differences = [own[seed] - baseline[seed] for seed in shared]
    difference = mean_interval(differences)
    first, second = (mean_interval(list(values.values())) for values in (own, baseline))
    p_value = p_of_mean(differences)
    if p_value is None:
        return Contrast(first, second, difference, margin, None, None, None, None)
    spread = float(np.std(differences, ddof=1))
    error = spread / math.sqrt(len(differences))
    equivalence = float(stdtr(len(differences) - 1, (abs(difference.mean) - margin) / error))
    errors = [np.var(list(values.values()), ddof=1) / len(values) for values in (own, baseline)]
    degrees = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (own, baseline), strict=True))
    welch = float(2 * stdtr(degrees, -abs(first.mean - second.mean) / math.sqrt(sum(errors))))
    return Contrast(first, second, difference, margin, spread, p_value, welch, equivalence)


def p_of_mean(values: Sequence[float]) -> float | None:
    """Two-sided p-value of Student's t for a mean of 0; None for fewer than two values, or equal ones.

    Equal values come from a coarse scale, such as costs on a grid, and have no spread to test with.
    """
    from scipy.special import stdtr

    if len(values) < 2 or np.isclose(np.ptp(values), 0, atol=1e-12):
        return None
    t = abs(np.mean(values)) / (np.std(values, ddof=1) / math.sqrt(len(values)))
    return float(2 * stdtr(len(values) - 1, -t))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values of Holm (1979): the k-th smallest of m times m − k + 1, made monotone and at most 1.

    A comparison without a p-value keeps None and counts as 1: m must not depend on the results.
    """
    known = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, index) in enumerate(known):
        adjusted[index] = largest = max(largest, min(1.0, (len(p_values) - rank) * value))
    return adjusted


def corrected(family: Sequence[Contrast], planned: int) -> list[Contrast]:
    """One family of comparisons with Holm's correction of their tests, and of their equivalence tests.

    planned: comparisons of the family, with those that have no values because a run ended early.
    """
    lost: list[float | None] = [None] * (planned - len(family))
    tests, equivalences = (holm([getattr(one, name) for one in family] + lost) for name in ("p_value", "equivalence"))
    return [replace(one, adjusted=p, equivalence=e) for one, p, e in zip(family, tests, equivalences, strict=False)]


def detectable(family: Sequence[Contrast], planned: int) -> float | None:
    """Smallest true difference that a paired t-test shows with 80% probability at Holm's first step, α/m.

    The spread is pooled over the family of m planned comparisons: that of one is too noisy a basis with few seeds.
    Exact, by the non-central t with the fewest seeds of the family. None without a spread.
    """
    from scipy import optimize, stats

    spreads = [one.spread for one in family if one.spread is not None]
    if not spreads:
        return None
    num = min(one.difference.num for one in family if one.spread is not None)
    error = math.sqrt(float(np.mean(np.square(spreads))) / num)
    critical = stats.t.isf(ALPHA / planned / 2, num - 1)
    # The lower tail adds less than α/2 to the power, and nothing near 80%.
    return error * float(optimize.brentq(lambda x: stats.nct.sf(critical, num - 1, x) - 0.8, 0, 2 * critical + 4))
