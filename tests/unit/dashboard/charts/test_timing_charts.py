"""A step's time is split into parts that sum to it."""

from __future__ import annotations

import pytest

from gxpo_dashboard.charts import timing
from gxpo_dashboard.view_models.series import Points


def points(steps: list[int], y: list[float]) -> Points:
    return Points(steps, [float(step) for step in steps], y)


SERIES = {
    "time/step_s": points([1, 2], [4.0, 6.0]),
    "time/rollout_s": points([1, 2], [1.0, 2.0]),
    "time/update_s": points([1, 2], [2.0, 3.0]),
    "time/sync_s": points([1, 2], [0.5, 0.5]),
    "time/evaluate_s": points([2], [5.0]),
}


def test_what_the_parts_leave_is_the_rest() -> None:
    wide = timing.step_parts(SERIES).pivot(index="x", columns="series", values="y")
    assert list(wide[timing.REST]) == [0.5, 0.5]
    assert list(wide.sum(axis=1)) == [4.0, 6.0]


def test_evaluation_is_no_part_of_a_step() -> None:
    assert "evaluation" not in set(timing.step_parts(SERIES)["series"])


def test_clocks_that_overlap_leave_no_negative_rest() -> None:
    found = timing.step_parts({"time/step_s": points([1], [1.0]), "time/update_s": points([1], [1.2])})
    assert list(found[found["series"] == timing.REST]["y"]) == [0.0]


def test_means_are_over_all_steps_and_evaluation_is_spread_over_them() -> None:
    means = timing.totals(SERIES).set_index("series")["y"]
    assert means["sampling"] == pytest.approx(1.5)
    assert means["update"] == pytest.approx(2.5)
    assert means["evaluation"] == pytest.approx(2.5)


def test_the_words_give_shares_of_all_time() -> None:
    # 10 s in all: 3 of sampling, 5 of update, 1 of sync, 1 of other.
    words = timing.step_time_chart(SERIES).summary
    assert words == "Share of step time: sampling 30%, update 50%, weight sync 10%, other 10%."


def test_without_a_step_it_says_so() -> None:
    assert timing.step_time_chart({}).empty
    assert timing.totals_chart({}).summary == "No steps yet."
