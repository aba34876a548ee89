"""pass@k, maj@n and their intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from gxpo_trainer.algo.passk import majority_at_n, pass_at_k, proportion_interval


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_average_over_all_subsets(n: int) -> None:
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in itertools.combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@given(st.integers(1, 5000), st.data())
def test_pass_at_k_equals_exact_binomials_for_large_n(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    total = math.comb(n, k)
    exact = (total - math.comb(n - c, k)) * 10**15 // total / 1e15
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-11)


def test_pass_at_1_is_the_share_of_correct_samples() -> None:
    """To the last bit, so that it equals the mean of the scores."""
    assert [pass_at_k(16, num_correct, 1) for num_correct in range(17)] == [share / 16 for share in range(17)]


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"samples"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["3", "3", "4"], [True, True, False], 1.0),
        (["3", "4", "4"], [True, False, False], 0.0),
        (["3", "4"], [True, False], 0.5),
        (["3", "4", "5"], [True, False, False], 1 / 3),
        ([None, None, None, "3"], [False, False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["1/2", "0.5", "2", "2"], [True, True, False, False], 0.5),
        ([" 4", "4 ", "3"], [False, False, True], 0.0),
    ],
)
def test_majority_vote_by_hand(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority_at_n(answers, correct) == pytest.approx(expected)


def test_majority_needs_one_verdict_an_answer() -> None:
    with pytest.raises(ValueError, match="2 answers and 1 verdicts"):
        majority_at_n(["1", "2"], [True])


@pytest.mark.parametrize(("correct", "problems"), [(0, 1), (0, 16), (1, 16), (5, 16), (16, 16), (93, 256)])
def test_an_answer_a_problem_has_wilsons_interval(correct: int, problems: int) -> None:
    reference = binomtest(correct, problems).proportion_ci(0.95, method="wilson")
    values = [1.0] * correct + [0.0] * (problems - correct)
    assert proportion_interval(values) == pytest.approx((reference.low, reference.high), abs=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_equal_scores_count_each_problem_once(share: float) -> None:
    reference = binomtest(int(16 * share), 16).proportion_ci(0.95, method="wilson")
    assert proportion_interval([share] * 16) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_scores_between_count_as_their_spread_says() -> None:
    # Mean 3/8 and variance 3/64: 4 · (15/64)/(3/64) = 20 answers, of which 7.5 are correct.
    z = 1.959963984540054
    center, root = (7.5 + z * z / 2) / (20 + z * z), z * math.sqrt(7.5 * 12.5 / 20 + z * z / 4) / (20 + z * z)
    assert proportion_interval([0.0, 0.5, 0.5, 0.5]) == pytest.approx((center - root, center + root), abs=1e-12)


@pytest.mark.parametrize("mean", [0.05, 0.5, 0.9])
def test_the_interval_holds_the_truth_as_often_as_it_says(mean: float) -> None:
    """40 problems of different difficulty, four samples each; near the edges their skew costs two points."""
    generator = np.random.default_rng(0)
    rates = generator.beta(2 * mean, 2 * (1 - mean), size=(2000, 40))
    scores = generator.binomial(4, rates) / 4
    covered = [low <= mean <= high for low, high in map(proportion_interval, scores)]
    assert 0.915 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0, 0.0]], [1.5], [-0.1]])
def test_what_is_no_list_of_scores_is_refused(values: list) -> None:
    with pytest.raises(ValueError, match="values must be"):
        proportion_interval(values)
