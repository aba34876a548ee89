"""Series of a run: thinned with their ends, peaks and dips; smoothed before; with equal steps where joined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gxpo_services.outputs.metric_series import SeriesQuery, series_of, smooth, thin
from gxpo_services.outputs.metrics import RECORD, Records


def records(values: dict[int, float]) -> Records:
    return np.array(list(values.items()), dtype=RECORD)


def over_steps(histories: dict[str, dict[int, float]], max_points: int, **query: Any) -> dict[str, dict[str, Any]]:
    stored = {name: records(values) for name, values in histories.items()}
    return series_of(stored, SeriesQuery(names=[*stored], max_points=max_points, **query), None)


def test_smoothing_is_the_exponential_average_of_what_is_finite() -> None:
    # m0 = 1; m1 = 0.5 * 1 + 0.5 * 3 = 2; m2 = 0.5 * 2 + 0.5 * 0 = 1
    assert smooth(np.array([1.0, 3.0, 0.0]), 0.5).tolist() == [1.0, 2.0, 1.0]
    averaged = smooth(np.array([math.nan, 1.0, math.nan, 3.0, math.inf]), 0.5).tolist()
    assert math.isnan(averaged[0])
    assert math.isnan(averaged[2])
    assert [averaged[1], *averaged[3:]] == [1.0, 2.0, math.inf]
    assert smooth(np.empty(0), 0.5).tolist() == []


def test_an_increment_continues_the_average_and_the_gate_and_the_passes_have_none() -> None:
    steps = {step: float(step % 3) for step in range(50)}
    whole = over_steps({"a": steps}, 100, smoothing=0.6)["a"]
    later = over_steps({"a": steps}, 100, after=39, smoothing=0.6)["a"]
    assert (later["steps"], later["y"]) == (list(range(40, 50)), whole["y"][40:])
    values = {1: 0.0, 2: 4.0}
    names = "gate/z", "eval/a/pass@1", "update/backward_passes", "update/backward_passes_total", "reward/mean"
    series = over_steps(dict.fromkeys(names, values), 10, smoothing=0.5)
    assert [series[name]["y"] for name in names] == [[0.0, 4.0]] * 4 + [[0.0, 2.0]]


def test_joined_series_have_the_same_steps_and_the_sums_of_all() -> None:
    # The extremes of the two lie at different steps. Sums: 1 + ... + 5000 = 12502500, and 2 for each step.
    rising = {step: float(step) for step in range(1, 5001)}
    noisy = {step: 2.0 + math.sin(step) for step in range(1, 5001)}
    rare = dict.fromkeys(range(0, 5001, 100), 7.0)
    apart = over_steps({"a": rising, "b": noisy}, 600)
    assert set(apart["a"]["steps"]) != set(apart["b"]["steps"])
    series = over_steps({"a": rising, "b": noisy, "c": rare, "d": {}}, 600, joined=True)
    assert series["b"]["steps"] == series["a"]["steps"]
    assert series["a"]["y"] == series["a"]["steps"]
    assert (series["a"]["steps"][-1], len(series["a"]["steps"])) == (5000, 599)
    assert (series["a"]["sum"], series["a"]["count"], series["a"]["downsampled"]) == (12502500.0, 5000, True)
    assert (series["c"]["sum"], series["c"]["count"]) == (357.0, 51)
    assert series["d"] == {"x": [], "y": [], "steps": [], "downsampled": False, "sum": 0.0, "count": 0}


@pytest.mark.parametrize(
    ("steps", "costs", "places"),
    [
        # The last total at or before a step; nothing is known before the first one, but that step 0 costs nothing.
        ([0, 1, 2, 3, 9], {2: 10.0, 4: 30.0}, [0.0, None, 10.0, 10.0, 30.0]),
        ([2, 4], {2: 10.0, 4: 30.0}, [10.0, 30.0]),
        ([0, 4], {0: 5.0, 4: 30.0}, [5.0, 30.0]),
        ([0, 1], {}, [0.0, None]),
        ([0, 1], None, [0.0, None]),
    ],
)
def test_a_point_lies_at_the_cost_of_its_step_and_one_of_unknown_cost_is_left_out(
    steps: list[int], costs: dict[int, float] | None, places: list[float | None]
) -> None:
    history = {"a": records({step: step + 0.5 for step in steps})}
    query = SeriesQuery(names=["a"], x="tokens")
    series = series_of(history, query, None if costs is None else records(costs))["a"]
    known = [(step, place) for step, place in zip(steps, places, strict=True) if place is not None]
    assert list(zip(series["steps"], series["x"], strict=True)) == known
    assert series["y"] == [step + 0.5 for step, _ in known]


VALUES = st.lists(st.floats(), max_size=300).map(np.array)
MOST = st.integers(4, 60)


def test_each_bucket_gives_its_lowest_and_its_highest_in_order() -> None:
    #         first | 5  1  9  3  | 4  4  8  2 | last
    values = np.array([7.0, 5, 1, 9, 3, 4, 4, 8, 2, 6])
    # Room for 6: both ends, and two buckets of four.
    assert thin(values, 6).tolist() == [0, 2, 3, 7, 8, 9]


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


def test_a_thinned_series_has_the_mean_and_the_bounds_of_equal_buckets_at_their_middles() -> None:
    # Two buckets of four for four points; the NaN and the infinity count for nothing.
    values = dict(enumerate([1.0, 5, 3, 3, 9, math.nan, math.inf, 3], start=1))
    series = over_steps({"a": values, "b": dict.fromkeys(range(1, 9), math.nan)}, 4)
    bounds = {"mean": [3.0, 6.0], "low": [1.0, 3.0], "high": [5.0, 9.0]}
    assert series["a"]["band"] == {"x": [2, 6], "steps": [2, 6], **bounds}
    assert np.isnan(series["b"]["band"]["mean"]).all()
    assert np.isnan(series["b"]["band"]["low"]).all()
    assert "band" not in over_steps({"a": values}, 8)["a"]
    assert "band" not in over_steps({"a": values}, 4, joined=True)["a"]


def test_a_range_of_the_axis_is_thinned_alone_and_averaged_over_all_steps() -> None:
    values = {step: float(step) for step in range(1, 5001)}
    near = over_steps({"a": values}, 600, **{"from": 100, "to": 300})["a"]
    assert (near["steps"], near["downsampled"]) == (list(range(100, 301)), False)
    # 0.5 of the step and 0.5 of the average before, which is the step minus one: m = s - 1.
    smoothed = over_steps({"a": values}, 600, smoothing=0.5, **{"from": 4999.5})["a"]
    assert (smoothed["steps"], smoothed["y"]) == ([5000], [pytest.approx(4999.0)])
    costs = records({step: 10.0 * step for step in values})
    query = SeriesQuery(names=["a"], x="tokens", **{"from": 45, "to": 70})  # type: ignore[arg-type]
    assert series_of({"a": records(values)}, query, costs)["a"]["steps"] == [5, 6, 7]
