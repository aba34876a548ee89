"""Thinning a curve keeps its ends, its peaks and its dips."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gxpo_services.outputs.metric_series import thin

VALUES = st.lists(st.floats(), max_size=300).map(np.array)
MOST = st.integers(4, 60)


def test_each_bucket_gives_its_lowest_and_its_highest_in_order() -> None:
    #         first | 5  1  9  3  | 4  4  8  2 | last
    values = np.array([7.0, 5, 1, 9, 3, 4, 4, 8, 2, 6])
    # Room for 6: both ends, and two buckets of four.
    assert thin(values, 6).tolist() == [0, 2, 3, 7, 8, 9]


def test_no_more_points_than_there_is_room_for_stay_as_they_are() -> None:
    values = np.array([3.0, math.nan, 1.0, 2.0])
    assert thin(values, 4).tolist() == [0, 1, 2, 3]
    assert thin(values[:0], 4).tolist() == []


def test_a_gap_of_nan_alone_stays_visible() -> None:
    values = np.array([0.0] + [1.0, 2.0] * 10 + [math.nan] * 20 + [3.0])
    kept = values[thin(values, 6)]
    assert np.isnan(kept).sum() == 1


def test_too_little_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        thin(np.zeros(10), 3)


@given(VALUES, MOST)
def test_ends_and_extremes_stay_and_nothing_comes_twice(values: np.ndarray, most: int) -> None:
    kept = thin(values, most).tolist()
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    if len(values):
        assert kept[0] == 0
        assert kept[-1] == len(values) - 1
    known = values[~np.isnan(values)]
    if len(known):
        assert np.nanmin(values[kept]) == known.min()
        assert np.nanmax(values[kept]) == known.max()


@given(st.integers(100, 3000), MOST)
def test_a_single_peak_anywhere_is_never_lost(length: int, most: int) -> None:
    for place in (1, length // 3, length - 2):
        values = np.zeros(length)
        values[place] = 1.0
        assert place in thin(values, most)
