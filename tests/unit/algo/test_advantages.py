"""Group-relative advantages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gxpo_trainer.algo.batch import group_advantages, reward_metrics, zero_variance

REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=12)


def test_advantages_by_hand_with_std() -> None:
    # mean 1/4; squared deviations 9/16 + 3/16 = 3/4; n − 1 = 3; std = 1/2.
    assert group_advantages([1, 0, 0, 0], epsilon=1e-12) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_advantages_by_hand_without_std() -> None:
    assert group_advantages([1, 0, 0, 0], use_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_epsilon_is_added_to_the_std() -> None:
    assert group_advantages([1, 0, 0, 0], epsilon=0.5) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_samples_without_evidence_enter_neither_mean_nor_std() -> None:
    with_gap = group_advantages([1, None, 0, 0, None, 0])
    assert np.isnan(with_gap[[1, 4]]).all()
    assert with_gap[[0, 2, 3, 5]] == pytest.approx(group_advantages([1, 0, 0, 0]), abs=0)


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero_and_have_unit_std(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards, epsilon=1e-12)
    known = advantages[~np.isnan(advantages)]
    assert np.isnan(advantages).tolist() == [reward is None for reward in rewards]
    assert known.sum() == pytest.approx(0, abs=1e-9)
    if not zero_variance(rewards):
        assert known.std(ddof=1) == pytest.approx(1, abs=1e-9)


@given(REWARDS, st.booleans())
def test_equal_rewards_give_exactly_zero(rewards: list[float | None], use_std: bool) -> None:
    if zero_variance(rewards):
        known = [a for a in group_advantages(rewards, use_std=use_std) if not math.isnan(a)]
        assert all(a == 0.0 for a in known)


def test_rounding_of_the_mean_is_no_signal() -> None:
    # The float mean of seven times 0.1 is not 0.1.
    assert (group_advantages([0.1] * 7, epsilon=1e-20) == 0).all()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 1], True), ([1, 0], False), ([1, None, 1], True), ([1, None], True), ([None, None], True), ([0], True)],
)
def test_zero_variance_means_nothing_to_compare(rewards: list[float | None], expected: bool) -> None:
    assert zero_variance(rewards) is expected


def test_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, float("nan")])


def test_reward_metrics_by_hand() -> None:
    metrics = reward_metrics([[1, 0, None], [1, 1, 1], [None, None, None], [0, 0, 1]])
    # Evidence: 1 0 | 1 1 1 | 0 0 1 = 5 of 8; one of three groups with evidence has no variance.
    assert metrics["reward/mean"] == pytest.approx(5 / 8)
    assert metrics["reward/std"] == pytest.approx(math.sqrt((5 * (3 / 8) ** 2 + 3 * (5 / 8) ** 2) / 7))
    assert metrics["reward/zero_variance_fraction"] == pytest.approx(1 / 3)


def test_two_rewards_have_a_standard_deviation() -> None:
    # Deviations ±1/2 from the mean 1/2: √(2 · 1/4 / 1).
    assert reward_metrics([[1, 0]])["reward/std"] == pytest.approx(math.sqrt(0.5))


def test_metrics_without_data_are_left_out() -> None:
    assert reward_metrics([[None, None]]) == {}
    assert "reward/std" not in reward_metrics([[1.0, None]])
