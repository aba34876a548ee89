"""Intervals and tests against hand calculation and scipy.stats, and their error rates by simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from gxpo_trainer.compare import intervals


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)])
def test_half_widths_are_those_of_a_printed_t_table(degrees: int, expected: float) -> None:
    values = np.arange(degrees + 1.0)
    interval = intervals.mean_interval(values)
    assert (interval.mean, interval.num) == (degrees / 2, degrees + 1)
    error = math.sqrt(np.sum((values - degrees / 2) ** 2) / degrees / (degrees + 1))
    assert interval.high - interval.mean == pytest.approx(expected * error, abs=6e-4 * error)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)


def test_one_value_has_no_interval_and_what_has_none_is_rejected() -> None:
    interval = intervals.mean_interval([0.4])
    assert (interval.mean, interval.low, interval.high) == (0.4, None, None)
    assert not interval.excludes(100.0)
    ends = intervals.Interval(0.5, 0.25, 1.0, 3)
    assert [ends.excludes(value) for value in (0.25, 0.5, 1.0, 0.2, 1.1)] == [False, False, False, True, True]
    for values, message in (([], "no values"), ([0.1, math.nan], "not finite")):
        with pytest.raises(ValueError, match=message):
            intervals.mean_interval(values)


def test_doubling_and_halving_average_to_no_speed_up() -> None:
    # logs are ±ln 2: mean 0, s = ln 2 · sqrt(2), half = 12.7062 · ln 2.
    interval = intervals.ratio_interval([2.0, 0.5])
    assert interval.mean == pytest.approx(1.0)
    assert interval.high == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-3)
    with pytest.raises(ValueError, match="positive"):
        intervals.ratio_interval([1.0, 0.0])


OWN = {0: 0.52, 1: 0.65, 2: 0.69, 3: 0.44, 4: 0.53, 9: 0.6}
BASE = {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.4, 4: 0.5}
"""Differences of the shared seeds: 0.02, 0.05, −0.01, 0.04, 0.03."""


def test_a_contrast_has_the_p_values_of_scipy() -> None:
    one = intervals.contrast(OWN, BASE, margin=0.06)
    own, base = (np.array([values[seed] for seed in BASE]) for values in (OWN, BASE))
    assert one.p_value == pytest.approx(stats.ttest_rel(own, base).pvalue, rel=1e-9)
    # Welch's takes all seeds, also those that only one side has.
    welch = stats.ttest_ind(list(OWN.values()), list(BASE.values()), equal_var=False).pvalue
    assert one.welch == pytest.approx(welch, rel=1e-9)
    sides = [stats.ttest_1samp(own - base, bound, alternative=s) for bound, s in ((-0.06, "greater"), (0.06, "less"))]
    assert one.equivalence == pytest.approx(max(side.pvalue for side in sides), rel=1e-9)
    assert one.spread == pytest.approx(0.0230217, rel=1e-5)
    assert (one.own.num, one.baseline.num, one.difference.num) == (6, 5, 5)
    interval = stats.t.interval(0.95, 4, loc=0.026, scale=0.0230217 / math.sqrt(5))
    assert (one.difference.low, one.difference.high) == pytest.approx(interval, abs=1e-6)
    assert intervals.contrast({0: 1.0}, {1: 1.0}) is None


def test_one_or_equal_differences_have_no_p_value() -> None:
    assert intervals.p_of_mean([0.1]) is None
    # t = 0.2 / (√0.02/√2) = 2 with one degree of freedom, a Cauchy distribution: 1 − 2·atan(2)/π.
    assert intervals.p_of_mean([0.1, 0.3]) == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-12)
    assert intervals.p_of_mean([0.1, 0.1, 0.1]) is None
    one = intervals.contrast({0: 0.5, 1: 0.6}, {0: 0.25, 1: 0.35})
    assert (one.p_value, one.welch, one.equivalence, one.spread) == (None, None, None, None)
    assert intervals.corrected([one], 1)[0].verdict == "not shown equivalent"


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.4: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.4.
    assert intervals.holm([0.03, 0.01, 0.4, 0.02]) == pytest.approx([0.06, 0.04, 0.4, 0.06])
    # What has no p-value counts as 1, or the results would decide how many tests there are: 0.01 times 3, 0.03 times 2.
    assert intervals.holm([0.03, None, 0.01]) == [pytest.approx(0.06), None, pytest.approx(0.03)]
    assert intervals.holm([0.9, 0.6]) == [1.0, 1.0]
    assert intervals.holm([]) == []


def test_a_comparison_that_a_run_ended_before_still_counts_among_those_that_are_corrected() -> None:
    """A third arm diverged: the p-values of the other two are those of three comparisons, not of two."""
    base = dict.fromkeys(range(3), 0.5)
    first = intervals.contrast({0: 0.51, 1: 0.52, 2: 0.54}, base)
    second = intervals.contrast({0: 0.51, 1: 0.50, 2: 0.52}, base)
    values = {name: sorted((getattr(first, name), getattr(second, name))) for name in ("p_value", "equivalence")}
    adjusted = intervals.corrected([first, second], 3)
    assert sorted(one.adjusted for one in adjusted) == pytest.approx(
        [3 * values["p_value"][0], min(1.0, 2 * values["p_value"][1])]
    )
    smallest = min(one.equivalence for one in adjusted)
    assert smallest == pytest.approx(min(1.0, 3 * values["equivalence"][0]))
    assert intervals.detectable([first, second], 3) > intervals.detectable([first, second], 2)


@pytest.mark.parametrize(
    ("mean", "adjusted", "equivalence", "verdict"),
    [
        (0.2, 0.04, 0.9, "higher"),
        (-0.2, 0.04, 0.9, "lower"),
        (-0.005, 0.04, 0.04, "lower, equivalent within 1 point"),
        (0.005, 0.05, 0.04, "equivalent within 1 point"),
        (0.005, 0.05, 0.05, "not shown equivalent"),
        (0.005, None, None, "not shown equivalent"),
    ],
)
def test_a_verdict_says_what_the_tests_carry(mean, adjusted, equivalence, verdict) -> None:
    one = replace(intervals.contrast(OWN, BASE), difference=intervals.Interval(mean, None, None, 5))
    assert replace(one, adjusted=adjusted, equivalence=equivalence).verdict == verdict
    assert "within 2 points" in replace(one, margin=0.02, equivalence=0.01, adjusted=1.0).verdict


@pytest.mark.parametrize("count", [1, 27])
def test_the_detectable_difference_has_the_stated_power_at_holms_first_step(count: int) -> None:
    """By the non-central t of scipy, both tails; the spread of the family is pooled."""
    narrow, wide = (replace(intervals.contrast(OWN, BASE), spread=spread) for spread in (0.01, 0.03))
    family = [narrow, wide] * count
    pooled = math.sqrt((0.01**2 + 0.03**2) / 2)
    shift = intervals.detectable(family, len(family)) / (pooled / math.sqrt(5))
    critical = stats.t.isf(0.05 / len(family) / 2, 4)
    power = stats.nct.sf(critical, 4, shift) + stats.nct.cdf(-critical, 4, shift)
    assert power == pytest.approx(0.8, abs=1e-3)
    assert intervals.detectable([], 1) is None


# Error rates. Each simulated study has five seeds and nine arms against one baseline, whose runs the arms share: the
# comparisons are dependent, as in a real study. Tolerances are four standard errors of a share of so many studies.
STUDIES, SEEDS, ARMS, SPREAD = 400, 5, 9, 0.01


def simulated(number: int, shift: float, margin: float = 0.01, arms: int = ARMS) -> list:
    draws = np.random.default_rng(number).normal(0.8, SPREAD, (arms + 1, SEEDS))
    base = dict(enumerate(draws[0]))
    return intervals.corrected(
        [intervals.contrast(dict(enumerate(row + shift)), base, margin) for row in draws[1:]], arms
    )


def within(share: float, of: int = STUDIES) -> float:
    return 4 * math.sqrt(share * (1 - share) / of)


def test_the_interval_over_seeds_covers_the_true_difference_and_one_over_problems_does_not() -> None:
    # 200 problems; policies differ by seed, and the true difference over seeds is 0.
    covered, conditional = [], []
    for number in range(STUDIES):
        generator = np.random.default_rng(number)
        rates = np.clip(generator.uniform(0.2, 0.9, 200) + generator.normal(0, 0.05, (2, SEEDS, 1)), 0, 1)
        scores = generator.binomial(4, rates) / 4
        differences = (scores[0] - scores[1]).mean(axis=1)
        covered.append(not intervals.mean_interval(differences).excludes(0.0))
        conditional.append(not intervals.mean_interval((scores[0] - scores[1]).mean(axis=0)).excludes(0.0))
    assert np.mean(covered) == pytest.approx(0.95, abs=within(0.95))
    assert np.mean(conditional) < 0.8, "what is conditional on the seeds covers too little for other seeds"


def test_holm_keeps_the_family_wise_error_under_the_null() -> None:
    studies = [simulated(number, 0.0) for number in range(STUDIES)]
    wrong = np.mean([any(one.shown for one in study) for study in studies])
    uncorrected = np.mean([any(one.p_value < 0.05 for one in study) for study in studies])
    assert wrong <= 0.05 + within(0.05)
    assert uncorrected > 0.15, "without a correction a true null is rejected in a study of nine arms far more often"


def test_an_effect_of_the_detectable_size_is_shown_as_often_as_stated() -> None:
    # The spread of a paired difference is √2 times that of a run.
    spread = math.sqrt(2) * SPREAD
    effect = intervals.detectable([replace(intervals.contrast(OWN, BASE), spread=spread)] * ARMS, ARMS)
    # At Holm's first step a comparison is tested at α/9, whatever the others show.
    shown = [one.p_value < 0.05 / ARMS for number in range(150) for one in simulated(number, effect)]
    assert np.mean(shown) == pytest.approx(0.8, abs=within(0.8, of=150))


@pytest.mark.parametrize("edge", [0.01, -0.01])
def test_tost_errs_in_at_most_five_percent_at_the_edge_of_its_margin(edge: float) -> None:
    """Uncorrected and alone: a true difference of exactly the margin is called equivalent in 5%, one of 0 mostly."""
    # With a spread that is small against the margin the error is all of the 5%.
    called = [intervals.contrast(*_pair(number, edge, 0.002), margin=0.01).equivalent for number in range(2 * STUDIES)]
    assert np.mean(called) == pytest.approx(0.05, abs=within(0.05, of=2 * STUDIES))
    equal = [intervals.contrast(*_pair(number, 0.0, 0.002), margin=0.01).equivalent for number in range(100)]
    assert np.mean(equal) > 0.95


def _pair(number: int, shift: float, spread: float) -> tuple[dict[int, float], dict[int, float]]:
    own, base = np.random.default_rng(number).normal(0.8, spread, (2, SEEDS))
    return dict(enumerate(own + shift)), dict(enumerate(base))
