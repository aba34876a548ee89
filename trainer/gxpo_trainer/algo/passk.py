"""pass@k, maj@n and the interval of their mean. Pure numpy.

pass@k is the unbiased estimator 1 − C(n−c, k)/C(n, k) of Chen et al. (arXiv 2107.03374): the probability that at
least one of k samples, drawn without replacement from n of which c are correct, is correct. pass@1 is c/n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of one problem, in [0, 1], for 1 ≤ k ≤ num_samples.

    The quotient of binomials is the product Π_{i=n−c+1..n} (1 − k/i), which neither overflows nor cancels.
    """
    if num_samples - num_correct < k:
        return 1.0
    if k == 1:
        return num_correct / num_samples
    factors = 1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(factors))


def majority_at_n(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """maj@n of one problem: whether the most frequent answer is correct. In [0, 1].

    answers: extracted from each sample, None where there is none; None never wins a vote. All correct samples vote for
    the same answer, whatever its notation. A tie counts as the share of correct answers among the tied ones, which is
    the expectation under a random choice. 0 when no sample has an answer.
    """
    votes = Counter(
        (right, "" if right else (answer or "").strip())
        for answer, right in zip(answers, correct, strict=True)
        if right or answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [right for (right, _), count in votes.items() if count == most]
    return sum(winners) / len(winners)


_Z = 1.959963984540054
"""Of the standard normal distribution, 97.5% lie below."""


def proportion_interval(values: npt.ArrayLike) -> tuple[float, float]:
    """95% interval of the mean of scores in [0, 1] over problems, (low, high): Wilson's for a proportion.

    values: [num_problems], one score per problem. Problems are independent, samples of one are not, so a problem counts
    once where each score is 0 or 1, and as often as the spread between problems says where scores lie between (the
    effective size of Korn and Graubard, 1998): m·(1 − m)/(s²/n) of mean m and variance s². Scores that are all equal
    tell nothing of that and count once each. So 0 of 16 problems is not 0 with certainty, but [0, 0.19].
    """
    scores = np.asarray(values, dtype=np.float64)
    mean, spread = float(scores.mean()), float(scores.var())
    size = scores.size * (mean * (1 - mean) / spread if np.ptp(scores) > 0 else 1.0)
    center = (mean + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * math.sqrt(mean * (1 - mean) / size + (_Z / (2 * size)) ** 2)
    # At the edges rounding could leave the mean outside.
    return min(max(0.0, center - half), mean), max(min(1.0, center + half), mean)
