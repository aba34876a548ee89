"""pass@k, maj@n and bootstrap intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gxpo_trainer.algo.passk import (
    bootstrap_interval,
    majority_at_n,
    pass_at_k,
)


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


def test_bootstrap_width_equals_the_normal_interval_for_many_problems() -> None:
    values = np.random.default_rng(3).binomial(4, 0.4, size=2000) / 4
    low, high = bootstrap_interval(values, num_resamples=4000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_bootstrap_is_a_function_of_values_and_seed() -> None:
    values = np.random.default_rng(0).random(50)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_equal_values_have_an_interval_of_width_zero() -> None:
    assert bootstrap_interval([1.0] * 20) == (1.0, 1.0)


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0, 2.0]]])
def test_bootstrap_refuses_what_is_not_a_list_of_scores(values: list) -> None:
    with pytest.raises(ValueError, match="values must be"):
        bootstrap_interval(values)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0.0}, {"num_resamples": 0}])
def test_bootstrap_refuses_impossible_options(options: dict) -> None:
    with pytest.raises(ValueError, match=r"confidence = .*, num_resamples = "):
        bootstrap_interval([0.0, 1.0], **options)
