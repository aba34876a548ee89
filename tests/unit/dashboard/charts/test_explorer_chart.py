"""The metric explorer: which metrics match, and their chart."""

from __future__ import annotations

import json
import math

from gxpo_dashboard.charts.curves import explorer_chart, matching, most_rows, prefixes
from gxpo_dashboard.view_models.series import EXTREMES, Points

NAMES = ["time/step_s", "gate/z", "gate/value", "reward/mean"]


def values(name: str, *y: float, log: bool = False) -> list[float]:
    points = Points(list(range(1, len(y) + 1)), [5400.0 * i for i in range(1, len(y) + 1)], list(y))
    chart = explorer_chart({name: {"a": points}}, ["a"], "time", log=log)
    return [float(value) for value in chart.datasets["points"]["y"]]


def test_metrics_are_grouped_by_their_prefix() -> None:
    assert prefixes(NAMES) == ["gate", "reward", "time"]
    assert matching(NAMES, "gate", "") == ["gate/value", "gate/z"]


def test_a_search_takes_every_word_in_any_order() -> None:
    assert matching(NAMES, "", "step TIME") == ["time/step_s"]
    assert matching(NAMES, "gate", "mean") == []


def test_many_runs_share_a_bounded_number_of_lines() -> None:
    assert [most_rows(num) for num in (1, 3, 4, 20, 60)] == [8, 8, 6, 1, 1]


def test_averages_arrive_from_the_service_and_the_note_gives_their_weight() -> None:
    points = Points([1, 2], [1.0, 2.0], [0.0, 4.0])
    plain, average = (explorer_chart({"reward/mean": {"a": points}}, ["a"], "step", weight) for weight in (0.0, 0.9))
    assert average.datasets["points"]["y"].tolist() == [0.0, 4.0]
    assert "Exponential average over all steps, weight 0.9" in average.note
    assert "average" not in plain.note


def test_a_thinned_series_is_named_below_the_chart_and_in_its_table() -> None:
    found = {"a": Points([1, 9], [1.0, 9.0], [0.0, 4.0], EXTREMES), "b": Points([1], [1.0], [2.0])}
    chart = explorer_chart({"reward/mean": found}, ["a", "b"], "step")
    assert chart.thinned == EXTREMES
    assert chart.text.endswith("Thinned to minima and maxima; the export in Compare has every step.")
    assert set(chart.table()["Thinned to"]) == {EXTREMES}
    whole = explorer_chart({"reward/mean": {"b": found["b"]}}, ["b"], "step")
    assert (whole.thinning, "Thinned to" in whole.table()) == ("", False)


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    found = values("reward/mean", 0.5, 0.0, -1.0, log=True)
    assert found[0] == 0.5
    assert all(math.isnan(value) for value in found[1:])


def test_time_is_shown_in_hours() -> None:
    points = Points([1], [5400.0], [1.0])
    chart = explorer_chart({"reward/mean": {"a": points}}, ["a"], "time")
    assert chart.datasets["points"]["x"].tolist() == [1.5]


def test_rows_share_pointer_zoom_and_legend_and_new_data_keeps_the_specification() -> None:
    def chart(num: int) -> object:
        series = {"a": Points([1] * num, [1.0] * num, [1.0] * num), "b": Points([1], [1.0], [2.0])}
        return explorer_chart({"gate/z": series, "reward/mean": series}, ["a", "b"], "step").spec

    spec = explorer_chart({"gate/z": {}, "reward/mean": {}}, ["a", "b"], "step").spec
    names = {layer["name"] for row in spec["vconcat"] for layer in row["layer"] if "name" in layer}
    assert {view for param in spec["params"] for view in param.get("views", [])} <= names
    assert [param["name"] for param in spec["params"]] == ["zoom", "hover", "shown"]
    assert json.dumps(chart(1)) == json.dumps(chart(3))
