"""Intervals against tables, hand calculation, an independent resampling, and their coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gxpo_trainer.compare import mean_interval, paired_bootstrap, ratio_interval, shared_bootstrap, t_critical


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


def test_critical_values_equal_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 5, 6, 7, 12, 25, 100, 301):
        for level in (0.5, 0.8, 0.95, 0.999):
            assert t_critical(level, degrees) == pytest.approx(stats.t.ppf((1 + level) / 2, degrees), rel=1e-9)


@pytest.mark.parametrize(("level", "degrees"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_impossible_levels_and_degrees_are_refused(level: float, degrees: int) -> None:
    with pytest.raises(ValueError, match=r"level =|degrees ="):
        t_critical(level, degrees)


def test_mean_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027 / sqrt(3) = 2.4842.
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.num) == (2.0, 3)
    assert found.low == pytest.approx(2 - 2.4842, abs=1e-4)
    assert found.high == pytest.approx(2 + 2.4842, abs=1e-4)


def test_one_value_has_no_interval_and_excludes_nothing() -> None:
    found = mean_interval([0.4])
    assert (found.mean, found.low, found.high) == (0.4, None, None)
    assert not found.excludes(100.0)


def test_no_value_and_a_value_that_is_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="not finite"):
        mean_interval([0.1, math.nan])


def test_doubling_and_halving_average_to_no_speed_up() -> None:
    # logs are ±ln 2: mean 0, s = ln 2 · sqrt(2), half = 12.7062 · ln 2.
    found = ratio_interval([2.0, 0.5])
    assert found.mean == pytest.approx(1.0)
    assert found.high == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-3)
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0])


def test_a_constant_difference_has_an_interval_of_no_width() -> None:
    noisy = np.random.default_rng(0).random((3, 50))
    found = paired_bootstrap(noisy + 0.1, noisy, over="both")
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)


def test_pairing_takes_out_what_the_problems_share() -> None:
    generator = np.random.default_rng(1)
    hardness = generator.random(200)
    first = hardness + 0.05 + 0.01 * generator.normal(size=200)
    paired = paired_bootstrap(first, hardness)
    shuffled = paired_bootstrap(first, generator.permutation(hardness))
    assert paired.low is not None
    assert paired.high is not None
    assert shuffled.low is not None
    assert shuffled.high is not None
    assert paired.high - paired.low < 0.1 * (shuffled.high - shuffled.low)


def test_bootstrap_is_a_function_of_its_seed() -> None:
    generator = np.random.default_rng(2)
    first, second = generator.random((2, 3, 40))
    assert paired_bootstrap(first, second, seed=5) == paired_bootstrap(first, second, seed=5)
    assert paired_bootstrap(first, second, seed=5) != paired_bootstrap(first, second, seed=6)


def test_shared_resamples_agree_with_plain_resampling_by_index() -> None:
    generator = np.random.default_rng(6)
    rows = generator.random((3, 40)) - [[0.5], [0.2], [0.0]]
    drawn = generator.integers(0, 40, (10_000, 40))
    for row, found in zip(rows, shared_bootstrap(rows, level=0.9), strict=True):
        low, high = np.quantile(row[drawn].mean(axis=1), [0.05, 0.95])
        assert (found.mean, found.num) == (pytest.approx(row.mean()), 40)
        assert found.low == pytest.approx(low, abs=0.05 * (high - low))
        assert found.high == pytest.approx(high, abs=0.05 * (high - low))


def test_an_interval_does_not_depend_on_what_shares_its_resamples() -> None:
    rows = np.random.default_rng(7).random((5, 30))
    alone = [shared_bootstrap(row[None], seed=3, num_resamples=700)[0] for row in rows]
    for one, other in zip(shared_bootstrap(rows, seed=3, num_resamples=700), alone, strict=True):
        assert (one.low, one.high) == (pytest.approx(other.low, rel=1e-12), pytest.approx(other.high, rel=1e-12))
    assert shared_bootstrap(rows[:1], seed=4, num_resamples=700)[0].low != alone[0].low


def test_differences_of_one_problem_have_no_bounds_and_missing_ones_are_refused() -> None:
    (found,) = shared_bootstrap([[0.25]])
    assert (found.mean, found.low, found.high, found.num) == (0.25, None, None, 1)
    for bad in ([], [[]], [0.1, 0.2], [[0.1, math.nan]]):
        with pytest.raises(ValueError, match="differences of shape"):
            shared_bootstrap(bad)


@pytest.mark.parametrize("over", ["problems", "seeds", "both"])
def test_bootstrap_agrees_with_plain_resampling_by_index(over: str) -> None:
    generator = np.random.default_rng(3)
    first, second = generator.random((2, 6, 30))
    difference = first - second
    means = []
    for _ in range(10_000):
        rows = generator.integers(0, 6, 6) if over != "problems" else np.arange(6)
        columns = generator.integers(0, 30, 30) if over != "seeds" else np.arange(30)
        means.append(difference[np.ix_(rows, columns)].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    found = paired_bootstrap(first, second, over=over)  # type: ignore[arg-type]
    assert found.mean == pytest.approx(difference.mean())
    assert found.low == pytest.approx(low, abs=0.05 * (high - low))
    assert found.high == pytest.approx(high, abs=0.05 * (high - low))


def test_one_seed_cannot_be_resampled() -> None:
    found = paired_bootstrap(np.ones((1, 9)), np.zeros((1, 9)), over="both")
    assert (found.mean, found.low, found.high, found.num) == (1.0, None, None, 1)


def test_unpaired_or_missing_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_bootstrap(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="not finite"):
        paired_bootstrap([1.0, math.nan], [0.0, 0.0])


def test_t_interval_over_four_seeds_covers_the_truth_19_times_in_20() -> None:
    # 4000 draws: the standard error of the coverage is 0.0034.
    draws = np.random.default_rng(4).normal(0.3, 0.02, size=(4000, 4))
    covered = [not mean_interval(row).excludes(0.3) for row in draws]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.014)


def test_ratio_interval_covers_the_true_speed_up() -> None:
    draws = np.exp(np.random.default_rng(5).normal(math.log(1.7), 0.2, size=(3000, 3)))
    covered = [not ratio_interval(row.tolist()).excludes(1.7) for row in draws]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.016)


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


def _crossed_coverage(num_seeds: int, over: str) -> float:
    generator = np.random.default_rng(7)
    covered = []
    for number in range(500):
        seeds, problems = generator.normal(size=(num_seeds, 1)), generator.normal(size=(1, 40))
        difference = seeds + problems + generator.normal(size=(num_seeds, 40))
        zeros = np.zeros_like(difference)
        found = paired_bootstrap(difference, zeros, over=over, num_resamples=400, seed=number)  # type: ignore[arg-type]
        covered.append(not found.excludes(0.0))
    return float(np.mean(covered))


def test_crossed_bootstrap_needs_a_dozen_seeds() -> None:
    assert _crossed_coverage(12, "both") > 0.90


def test_bootstrap_over_three_seeds_undercovers_as_its_page_says() -> None:
    assert _crossed_coverage(3, "seeds") < 0.80
