"""pass@k, maj@n and the bootstrap interval of their mean. Pure numpy.

pass@k is the unbiased estimator 1 − C(n−c, k)/C(n, k) of Chen et al. (arXiv 2107.03374): the probability that at
least one of k samples, drawn without replacement from n of which c are correct, is correct. pass@1 is c/n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of one problem, in [0, 1].

    The quotient of binomials is the product Π_{i=n−c+1..n} (1 − k/i), which neither overflows nor cancels.

    Raises ValueError unless 1 ≤ k ≤ num_samples and 0 ≤ num_correct ≤ num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} with {num_samples} samples; use 1 ≤ k ≤ evaluation.samples_per_prompt")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} of {num_samples} samples; it must lie in [0, {num_samples}]")
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

    Raises ValueError when the two differ in length or are empty.
    """
    if len(answers) != len(correct) or not answers:
        raise ValueError(f"{len(answers)} answers and {len(correct)} verdicts; give one of each per sample")
    votes: dict[tuple[bool, str], int] = defaultdict(int)
    for answer, right in zip(answers, correct, strict=True):
        if right:
            votes[(True, "")] += 1
        elif answer is not None:
            votes[(False, answer.strip())] += 1
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [right for (right, _), count in votes.items() if count == most]
    return sum(winners) / len(winners)


def bootstrap_interval(
    values: npt.ArrayLike, *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; (low, high).

    values: [num_problems], one score per problem (samples of a problem are not independent, problems are). The same
    values and seed give the same interval. Too narrow for fewer than about 30 problems, as the percentile
    bootstrap is, and of width 0 when all values are equal.

    Raises ValueError for no values, values that are not finite, or a confidence outside (0, 1).
    """
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ValueError(f"confidence = {confidence}, num_resamples = {num_resamples}; use (0, 1) and at least 1")
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("values must be one-dimensional, finite and not empty; give one score per problem")
    # Scores take few distinct values (c/n), so a resample is drawn as multinomial counts of them: the same
    # distribution as drawing problems, without an array of num_resamples × num_problems indices.
    distinct, counts = np.unique(scores, return_counts=True)
    rng = np.random.default_rng(seed)
    means = rng.multinomial(scores.size, counts / scores.size, size=num_resamples) @ distinct / scores.size
    tail = 50 * (1 - confidence)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)
