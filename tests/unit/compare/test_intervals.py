"""Intervals against printed tables, hand calculation, independent resampling, and coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gxpo_trainer.compare.intervals import (
    Interval,
    detectable_difference,
    holm,
    mean_interval,
    paired_bootstrap,
    paired_p_value,
    ratio_interval,
    shared_bootstrap,
    t_critical,
)


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 9, 2.262),
        (0.95, 30, 2.042),
        (0.99, 5, 4.032),
        (0.90, 7, 1.895),
    ],
)
def test_critical_values_are_those_of_a_printed_t_table(level: float, degrees: int, expected: float) -> None:
    assert t_critical(level, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(("level", "degrees"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_invalid_levels_and_degrees_are_rejected(level: float, degrees: int) -> None:
    with pytest.raises(ValueError, match=r"level =|degrees ="):
        t_critical(level, degrees)


def test_mean_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027 / sqrt(3) = 2.4842.
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.num) == (2.0, 3)
    assert interval.low == pytest.approx(2 - 2.4842, abs=1e-4)
    assert interval.high == pytest.approx(2 + 2.4842, abs=1e-4)


def test_one_value_has_no_interval_and_excludes_nothing() -> None:
    interval = mean_interval([0.4])
    assert (interval.mean, interval.low, interval.high) == (0.4, None, None)
    assert not interval.excludes(100.0)


def test_empty_and_non_finite_values_are_rejected() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="not finite"):
        mean_interval([0.1, math.nan])


def test_doubling_and_halving_average_to_no_speed_up() -> None:
    # logs are ±ln 2: mean 0, s = ln 2 · sqrt(2), half = 12.7062 · ln 2.
    interval = ratio_interval([2.0, 0.5])
    assert interval.mean == pytest.approx(1.0)
    assert interval.high == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-3)
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0])


def test_bootstrap_is_a_function_of_its_seed() -> None:
    generator = np.random.default_rng(2)
    first, second = generator.random((2, 40))
    assert paired_bootstrap(first, second, seed=5) == paired_bootstrap(first, second, seed=5)
    assert paired_bootstrap(first, second, seed=5) != paired_bootstrap(first, second, seed=6)


def test_shared_resamples_agree_with_plain_resampling_by_index() -> None:
    generator = np.random.default_rng(6)
    rows = generator.random((3, 40)) - [[0.5], [0.2], [0.0]]
    drawn = generator.integers(0, 40, (10_000, 40))
    for row, interval in zip(rows, shared_bootstrap(rows, level=0.9), strict=True):
        low, high = np.quantile(row[drawn].mean(axis=1), [0.05, 0.95])
        assert (interval.mean, interval.num) == (pytest.approx(row.mean()), 40)
        assert interval.low == pytest.approx(low, abs=0.05 * (high - low))
        assert interval.high == pytest.approx(high, abs=0.05 * (high - low))


def test_an_interval_does_not_depend_on_the_other_rows() -> None:
    rows = np.random.default_rng(7).random((5, 30))
    alone = [shared_bootstrap(row[None], seed=3, num_resamples=700)[0] for row in rows]
    for one, other in zip(shared_bootstrap(rows, seed=3, num_resamples=700), alone, strict=True):
        assert (one.low, one.high) == (pytest.approx(other.low, rel=1e-12), pytest.approx(other.high, rel=1e-12))
    assert shared_bootstrap(rows[:1], seed=4, num_resamples=700)[0].low != alone[0].low


def test_one_problem_has_no_bounds_and_missing_scores_are_rejected() -> None:
    assert shared_bootstrap([[0.0, 1.0]]) == [Interval(0.5, 0.0, 1.0, 2)], "two problems have"
    assert shared_bootstrap([[0.25], [0.5]]) == [Interval(0.25, None, None, 1), Interval(0.5, None, None, 1)]
    for bad in ([], [[]], [0.1, 0.2], [[0.1, math.nan]]):
        with pytest.raises(ValueError, match="differences of shape"):
            shared_bootstrap(bad)


def test_unpaired_or_missing_scores_are_rejected() -> None:
    for sizes in ((3, 4), (4, 3)):
        with pytest.raises(ValueError, match="cannot be paired"):
            paired_bootstrap(*map(np.ones, sizes))
    with pytest.raises(ValueError, match="not finite"):
        paired_bootstrap([1.0, math.nan], [0.0, 0.0])


def test_bootstrap_over_problems_covers_the_true_difference() -> None:
    # Two policies on 120 problems with 4 samples each; success rates shared up to a shift of 0.06.
    generator = np.random.default_rng(6)
    covered = []
    for number in range(300):
        rates = generator.uniform(0.1, 0.8, size=120)
        first = generator.binomial(4, rates + 0.06) / 4
        second = generator.binomial(4, rates) / 4
        covered.append(not paired_bootstrap(first, second, num_resamples=500, seed=number).excludes(0.06))
    assert np.mean(covered) == pytest.approx(0.945, abs=0.038)


DIFFERENCES = [0.02, 0.05, -0.01, 0.04, 0.03]


def test_the_p_value_is_that_of_scipys_paired_t_test() -> None:
    baseline = [0.5, 0.6, 0.7, 0.4, 0.5]
    candidate = [b + d for b, d in zip(baseline, DIFFERENCES, strict=True)]
    assert paired_p_value(DIFFERENCES) == pytest.approx(stats.ttest_rel(candidate, baseline).pvalue, rel=1e-9)


def test_one_or_equal_differences_have_no_p_value() -> None:
    assert paired_p_value([0.1]) is None
    # t = 0.2 / (√0.02/√2) = 2 with one degree of freedom, a Cauchy distribution: 1 − 2·atan(2)/π.
    assert paired_p_value([0.1, 0.3]) == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-12)
    assert paired_p_value([0.1, 0.1, 0.1]) is None


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.4: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.4.
    assert holm([0.03, 0.01, 0.4, 0.02]) == pytest.approx([0.06, 0.04, 0.4, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_detectable_difference_by_hand() -> None:
    # n = 5, 4 degrees: t(0.975) = 2.776, t(0.8) = 0.941; s = 0.02302.
    expected = (2.7764451 + 0.9409646) * 0.0230217 / math.sqrt(5)
    assert detectable_difference(DIFFERENCES) == pytest.approx(expected, rel=1e-5)
    assert detectable_difference([0.1]) is None
