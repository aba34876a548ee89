"""Tests of few paired differences against scipy.stats and calculations by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from gxpo_trainer.compare.intervals import detectable_difference, holm, paired_p_value

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


def test_the_detectable_difference_has_the_stated_power() -> None:
    """A true difference of that size is found with about 80% probability by the non-central t."""
    found = detectable_difference(DIFFERENCES)
    shift = found / (0.0230217 / math.sqrt(5))
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, 4), 4, shift)
    assert power == pytest.approx(0.8, abs=0.03)
