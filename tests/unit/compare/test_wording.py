"""Figures of comparisons as text."""

from __future__ import annotations

import math

import pytest

from gxpo_client import formats
from gxpo_trainer.compare.evidence import hours, points, ratio_interval, ratio_words
from gxpo_trainer.compare.intervals import Interval


@pytest.mark.parametrize(
    "seconds",
    [
        0.0, 0.0042, 0.0994, 0.2, 4.2, 9.96, 10, 59.4, 59.6, 75, 145, 3599, 3600, 11520, 86399, 86400, 200_000,
        -1.0, math.nan, math.inf,
    ],
)  # fmt: skip
def test_a_duration_reads_like_the_clients(seconds: float) -> None:
    assert hours(seconds / 3600) == formats.duration(seconds)


def test_a_difference_has_a_true_minus() -> None:
    assert points(-0.0421) == "−4.2"
    assert points(0.147) == "+14.7"


def test_a_ratio_is_told_as_what_it_is() -> None:
    assert ratio_words(3.0, "steps") == "3.0× fewer steps"
    assert ratio_words(0.5, "backward_passes") == "2.0× more backward passes"
    assert ratio_words(0.625, "hours") == "1.6× more time"
    assert ratio_words(1.04, "hours") == ratio_words(1 / 1.04, "hours") == "equal time"


def test_the_bounds_of_a_ratio_follow_its_direction() -> None:
    assert ratio_interval(Interval(2.0, 1.6, 3.0, 3), "steps") == "2.0× fewer (1.6 to 3.0)"
    # 1 / 0.8 and 1 / 0.4.
    assert ratio_interval(Interval(0.5, 0.4, 0.8, 3), "backward_passes") == "2.0× more (1.2 to 2.5)"
    assert ratio_interval(Interval(1.25, 0.5, 2.0, 3), "hours") == "1.2× less (2.0× more to 2.0× less)"
    assert ratio_interval(Interval(1.0, 1.0, 1.0, 3), "hours") == "equal"
    assert ratio_interval(Interval(0.5, None, None, 1), "hours") == "2.0× more"
