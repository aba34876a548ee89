"""The metric explorer: which metrics match, and their chart."""

from __future__ import annotations

import json
import math

from gxpo_dashboard.charts.explorer import explorer_chart, matching, most_rows, prefixes
from gxpo_dashboard.view_models.series import Points

NAMES = ["time/step_s", "gate/z", "gate/value", "reward/mean"]


def values(name: str, *y: float, smoothing: float = 0.0, log: bool = False) -> list[float]:
    points = Points(list(range(1, len(y) + 1)), [5400.0 * i for i in range(1, len(y) + 1)], list(y))
    chart = explorer_chart({name: {"a": points}}, ["a"], "time", smoothing, log)
    return [float(value) for value in chart.datasets["points"]["y"]]


def test_metrics_are_grouped_by_their_prefix() -> None:
    assert prefixes(NAMES) == ["gate", "reward", "time"]
    assert matching(NAMES, "gate", "") == ["gate/value", "gate/z"]


def test_a_search_takes_every_word_in_any_order() -> None:
    assert matching(NAMES, "", "step TIME") == ["time/step_s"]
    assert matching(NAMES, "gate", "mean") == []


def test_many_runs_share_a_bounded_number_of_lines() -> None:
    assert [most_rows(num) for num in (1, 3, 4, 20, 60)] == [8, 8, 6, 1, 1]


def test_z_scores_are_never_smoothed() -> None:
    assert values("gate/z", 0.0, 4.0, smoothing=0.9) == [0.0, 4.0]
    assert values("reward/mean", 0.0, 4.0, smoothing=0.5) == [0.0, 2.0]


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
