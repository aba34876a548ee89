"""Metric charts and the metric explorer: reported metrics are drawn, and data never enters the specification."""

from __future__ import annotations

import json
import math
import re
from urllib.parse import unquote

import pandas as pd
import pytest

from gxpo_dashboard.charts import base, curves
from gxpo_dashboard.charts.base import Chart, Plot
from gxpo_dashboard.charts.curves import matching
from gxpo_dashboard.view_models.series import BANDS, Points, Series

DOTS = {"layer": [base.layer("points", "point", {})]}


def points(y: list[float], x: list[float] | None = None) -> Points:
    steps = list(range(1, len(y) + 1))
    return Points(steps, x or [float(step) for step in steps], y)


def drawn(series: Series, names: dict[str, str], x: str = "step", *, log: bool = False) -> Chart:
    return base.metric_chart(Plot("k", "t", names, "y", log=log), series, x)


def test_metrics_without_a_point_are_left_out() -> None:
    chart = drawn({"a": points([1.0]), "b": Points()}, {"a": "A", "b": "B"})
    assert chart.points["series"].tolist() == ["A"]
    assert chart.summary == "At step 1: A 1."


@pytest.mark.parametrize("x", list(base.AXES))
def test_new_data_does_not_change_a_specification(x: str) -> None:
    plots = (curves.REWARD, *curves.LOOK_AHEAD, *curves.POLICY, *curves.SYSTEM)
    before, after = ({name: points(y) for plot in plots for name in plot.metrics} for y in ([0.5], [0.5, 0.7, 0.9]))
    for plot in plots:
        old, new = base.metric_chart(plot, before, x), base.metric_chart(plot, after, x)
        assert (json.dumps(old.spec), old.alt) == (json.dumps(new.spec), new.alt)


def picture(*y: float) -> list[tuple[str, float, float]]:
    """The commands of a sparkline's path with their places, `h` for a dot."""
    address = curves.sparkline(list(enumerate(y)), "#3f7fbf")
    path = unquote(address).split("path d='")[1].split("'")[0]
    return [(kind, float(x), float(height)) for kind, x, height in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_a_sparkline_draws_each_point_where_it_is_and_leaves_gaps() -> None:
    # 92 pixels for three steps after a margin of 4; 20 pixels from the lowest to the highest.
    assert picture(0.0, 1.0, 0.5, 1.0) == [("M", 4, 24), ("L", 34.7, 4), ("L", 65.3, 14), ("L", 96, 4)]
    assert picture(1.0, math.nan, 0.0, 1.0) == [("M", 4, 4), ("M", 65.3, 24), ("L", 96, 4)]
    assert picture(0.25) == [("M", 4, 24)]
    assert curves.sparkline([(1.0, math.nan)], "#3f7fbf") == curves.sparkline([], "#3f7fbf") == ""


def test_a_point_without_neighbours_is_drawn_and_kept_among_the_hover_points() -> None:
    values = [0.5] * 2500
    values[7] = values[9] = math.nan
    chart = drawn({"a": points(values), "b": points([0.3])}, {"a": "A", "b": "B"})
    near = chart.datasets["near"]
    assert near[near["lone"]][["series", "step"]].to_numpy().tolist() == [["A", 9], ["B", 1]]
    condition = chart.spec["layer"][-1]["encoding"]["opacity"]["condition"]
    assert {"test": "datum.lone", "value": 1} in condition


@pytest.mark.parametrize(
    ("values", "log", "lone", "hidden"),
    [
        ([0.0, 5.0, 0.0, 0.0, 7.0, 0.0], True, [2, 5], 4),
        ([0.0, 5.0, 0.0, 0.0, 7.0, 0.0], False, [], 0),
        ([math.inf, 5.0, -math.inf, 2.0, 3.0], True, [2], 1),
        ([math.inf, 5.0, -math.inf, 2.0, 3.0], False, [2], 0),
    ],
)
def test_a_point_between_values_that_no_axis_shows_is_drawn_and_the_table_keeps_them(
    values: list[float], log: bool, lone: list[int], hidden: int
) -> None:
    chart = drawn({"a": points(values)}, {"a": "A"}, log=log)
    near = chart.datasets["near"]
    assert near[near["lone"]]["step"].tolist() == lone
    assert chart.table()["Value"].tolist() == values
    words = f"Not shown on the logarithmic axis: {hidden} value{'s' if hidden > 1 else ''} ≤ 0."
    assert chart.processing == (words if hidden else "")
    positive = {"calculate": "datum.y > 0 ? datum.y : null", "as": "y"}
    assert all(log == (positive in layer.get("transform", [])) for layer in chart.spec["layer"])


@pytest.mark.parametrize(
    ("num", "length", "height", "expected"),
    [
        (1, 60, 220, 220),
        # 34 + 7·23 pixels a name: one column in 280 pixels; 160 of the plot, 92 around it and 16 a row.
        (2, 23, 220, 284),
        (20, 23, 220, 572),
        (3, 23, 300, 300),
        # 34 + 7·6: three columns, six rows.
        (17, 6, 300, 348),
    ],
)
def test_a_legend_leaves_room_for_the_plot_on_a_narrow_page_and_names_every_line(
    num: int, length: int, height: int, expected: int
) -> None:
    names = [str(number).zfill(length) for number in range(num)]
    assert base.height_with_legend(names, height) == expected
    assert (base.legend(names) or {"symbolLimit": 0})["symbolLimit"] == 0
    chart = drawn({name: points([1.0]) for name in names}, {name: name for name in names})
    assert chart.height == max(300, expected)


def test_a_thinned_series_is_a_line_of_means_in_a_band_and_its_newer_points_and_named_as_such() -> None:
    series = Points([1, 4, 8, 9], [1.0, 4.0, 8.0, 9.0], [9.0, 1.0, 3.0, 2.0], BANDS)
    series.band, series._complete = [(2, 2.0, 5.0, 1.0, 9.0), (6, 6.0, 3.0, 3.0, 3.0)], 8
    chart = drawn({"a": series}, {"a": "A"})
    assert chart.points[["x", "y", "low"]].to_numpy().tolist()[:2] == [[2.0, 5.0, 1.0], [6.0, 3.0, 3.0]]
    assert chart.points["step"].tolist() == [2, 6, 9]
    assert chart.summary == "At step 9: A 2."
    band, line, _ = chart.spec["layer"]
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")
    assert line["encoding"]["y"]["field"] == "y"
    assert chart.text.endswith("Thinned to means in a band of minima and maxima; the export in Compare has every step.")
    assert set(chart.table()["Thinned to"]) == {BANDS}
    whole = drawn({"b": points([2.0])}, {"b": "B"})
    assert (whole.processing, "Thinned to" in whole.table()) == ("", False)


def test_an_average_is_said_to_be_one_in_the_text_and_in_the_file() -> None:
    series = points([1.0, 2.0])
    series.smoothing = 0.9
    chart = drawn({"a": series}, {"a": "A"})
    assert chart.text == "At step 2: A 2. Exponential average, weight 0.9."
    assert set(chart.table()["Average, weight"]) == {0.9}
    assert "Average, weight" not in drawn({"b": points([2.0])}, {"b": "B"}).table()


def test_the_part_of_a_chart_has_its_data_alone() -> None:
    datasets = {
        "points": pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0]}),
        "phases": pd.DataFrame({"x": [0.0, 3.5], "x2": [2.5, 9.0]}),
        "rules": pd.DataFrame({"y": [3.0]}),
    }
    part = base.between(Chart("k", "t", DOTS, datasets, "", "", x="step"), 2.0, 3.0).datasets
    assert part["points"]["x"].tolist() == [2.0, 3.0]
    assert part["phases"].to_numpy().tolist() == [[2.0, 2.5]]
    assert part["rules"]["y"].tolist() == [3.0]


def test_a_range_is_selected_by_dragging_and_nothing_takes_the_wheel() -> None:
    chart = drawn({"a": points([1.0])}, {"a": "A"})
    assert not re.search("wheel|scales", json.dumps(chart.spec))
    text = json.dumps(base.with_brush(chart))
    assert text.count('"brush"') == 1
    assert '"zoom": false, "translate": false' in text


NAMES = ["time/step_s", "gate/z", "gate/value", "reward/mean"]


def test_metrics_match_their_group_and_every_word_of_a_search_in_any_order() -> None:
    assert matching(NAMES, "gate", "") == ["gate/value", "gate/z"]
    assert matching(NAMES, "", "step TIME") == ["time/step_s"]
    assert matching(NAMES, "gate", "mean") == []


def test_hidden_outliers_are_counted_and_bands_end_at_their_limits() -> None:
    wild, constant = points([1.0, 2.0, 3.0, 4.0, 100.0]), points([5.0, 5.0, 5.0, 5.0, 9.0])
    chart = drawn({"a": wild, "b": constant}, {"a": "A", "b": "B"})
    chart.points.loc[3, ["low", "high"]] = [-20.0, 50.0]
    calm, hidden = base.without_outliers(chart)
    # Quartiles of A are 2 and 4: its limits are 2 − 3·2 and 4 + 3·2. B has no spread, so that nothing is far out.
    assert hidden == 1
    rows = calm.points
    assert rows["y"].tolist() == [1, 2, 3, 4, 5, 5, 5, 5, 9]
    assert rows.loc[3, ["low", "high"]].tolist() == [-4, 10]
    part = {"y": {"field": "y", "stack": "zero"}}
    stacked = Chart("k", "t", {"layer": [base.layer("points", "area", part)]}, chart.datasets, "", "")
    assert base.without_outliers(stacked) == (stacked, 0), "a sum without one of its parts is another"
    without_lines = Chart("k", "t", DOTS, {"points": rows[["y"]]}, "", "")
    assert base.without_outliers(without_lines)[1] == 0
