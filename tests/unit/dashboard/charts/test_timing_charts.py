"""A step's time is split into parts that sum to it."""

from __future__ import annotations

import numpy as np
import pytest

from gxpo_dashboard.charts import steps as timing
from gxpo_dashboard.view_models.series import LiveSeries, Points, Total
from gxpo_services.outputs.metric_series import Shape, series_of
from gxpo_services.outputs.metrics import RECORD


def points(steps: list[int], y: list[float]) -> Points:
    return Points(steps, [float(step) for step in steps], y)


SERIES = {
    "time/step_s": points([1, 2], [4.0, 6.0]),
    "time/rollout_s": points([1, 2], [1.0, 2.0]),
    "time/update_s": points([1, 2], [2.0, 3.0]),
    "time/sync_s": points([1, 2], [0.5, 0.5]),
    "time/evaluate_s": points([2], [5.0]),
}
TOTALS = {name: Total(sum(found.y), len(found)) for name, found in SERIES.items()}


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
    means = timing.means(TOTALS).set_index("series")["y"]
    assert means["sampling"] == pytest.approx(1.5)
    assert means["update"] == pytest.approx(2.5)
    assert means["evaluation"] == pytest.approx(2.5)


def test_the_words_give_shares_of_all_time() -> None:
    # 10 s in all: 3 of sampling, 5 of update, 1 of sync, 1 of other.
    words = timing.step_time_chart(SERIES, TOTALS).summary
    assert words == "Share of step time: sampling 30%, update 50%, weight sync 10%, other 10%."


def test_without_a_step_it_says_so() -> None:
    assert timing.step_time_chart({}, {}).empty
    assert timing.totals_chart({"time/step_s": Total(0.0, 0)}).summary == "No steps yet."


def test_five_thousand_steps_have_the_shares_and_means_of_all_of_them() -> None:
    """Peaks of the parts at different steps: thinned apart, hardly two parts of a step are left."""
    steps = np.arange(1, 5001)
    update = np.where(steps % 7 == 3, 9.0, 3.0)
    rollout = np.where(steps % 11 == 5, 9.0, 1.0)
    parts = {"time/update_s": update, "time/rollout_s": rollout, "time/step_s": update + rollout + 0.1}
    histories = {name: np.array(list(zip(steps, y, strict=True)), dtype=RECORD) for name, y in parts.items()}
    evaluated = steps[steps % 100 == 0]
    histories["time/evaluate_s"] = np.array([(step, 50.0) for step in evaluated], dtype=RECORD)
    live = LiveSeries(joined=True)
    shape = Shape(live.max_points, joined=True)
    series = series_of(histories, shape, None, over_costs=False)
    live.refresh(lambda after: {"revision": 1, "attempt": 1, "last_step": 5000, "series": series})

    # Of all steps, 714 have an update of 9 s and 455 a rollout of 9 s; 50 evaluations take 50 s each.
    means = timing.means(live.totals).set_index("series")["y"]
    assert means["update"] == pytest.approx(3 + 6 * 714 / 5000)
    assert means["sampling"] == pytest.approx(1 + 8 * 455 / 5000)
    assert means[timing.REST] == pytest.approx(0.1)
    assert means["evaluation"] == pytest.approx(50 * 50 / 5000)
    # 3.8568 + 1.728 + 0.1 = 5.6848
    words = timing.step_time_chart(live.points, live.totals).summary
    assert words == "Share of step time: sampling 30%, update 68%, other 2%."
    wide = timing.step_parts(live.points).pivot(index="x", columns="series", values="y")
    assert len(wide) == 600
    assert not wide.isna().to_numpy().any()
    assert wide[timing.REST].to_numpy() == pytest.approx(0.1)
