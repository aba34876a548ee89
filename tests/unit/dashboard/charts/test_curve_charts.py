"""Metric charts and the metric explorer: reported metrics are drawn, and data never enters the specification."""

from __future__ import annotations

import json
import math

import pytest

from gxpo_dashboard.charts import base, curves
from gxpo_dashboard.charts.base import Chart, Plot
from gxpo_dashboard.charts.curves import explorer_chart, matching
from gxpo_dashboard.view_models.series import EXTREMES, Points, Series


def points(y: list[float], x: list[float] | None = None) -> Points:
    steps = list(range(1, len(y) + 1))
    return Points(steps, x or [float(step) for step in steps], y)


def drawn(series: Series, names: dict[str, str], x: str = "step", *, log: bool = False) -> Chart:
    return base.metric_chart(Plot("k", "t", names, "y", log=log), series, x)


def test_metrics_without_a_point_are_left_out() -> None:
    chart = drawn({"a": points([1.0]), "b": Points()}, {"a": "A", "b": "B"})
    assert chart.points["series"].tolist() == ["A"]
    assert chart.summary == "At step 1: A 1."


def test_the_table_has_a_column_for_each_series() -> None:
    series = {"a": points([1.0, 2.0]), "b": points([3.0, 4.0])}
    table = drawn(series, {"b": "B", "a": "A"}).table()
    assert table.to_dict("list") == {"Training step": [1.0, 2.0], "B": [3.0, 4.0], "A": [1.0, 2.0]}


def test_the_table_over_a_cost_keeps_the_steps() -> None:
    series = {"a": points([1.0, 2.0], [100.0, 250.0])}
    table = drawn(series, {"a": "A"}, "tokens").table()
    assert table.to_dict("list") == {"Sampled tokens": [100.0, 250.0], "Step": [1, 2], "A": [1.0, 2.0]}


def test_what_is_not_positive_has_no_place_on_a_logarithmic_axis() -> None:
    chart = drawn({"a": points([1e-7, 0.0])}, {"a": "A"}, log=True)
    assert chart.points["y"][0] == 1e-7
    assert math.isnan(chart.points["y"][1])


def test_where_a_step_lies_on_another_axis() -> None:
    series = points([0.0] * 3, [3.0, 6.0, 7.0])
    assert [base.value_at(series, step, "backward_passes") for step in (2, 9)] == [6.0, 7.0]
    assert math.isnan(base.value_at(series, 0, "backward_passes"))


@pytest.mark.parametrize("x", list(base.AXES))
def test_new_data_does_not_change_a_specification(x: str) -> None:
    plots = (curves.REWARD, *curves.LOOK_AHEAD, *curves.POLICY, *curves.SYSTEM)
    before, after = ({name: points(y) for plot in plots for name in plot.metrics} for y in ([0.5], [0.5, 0.7, 0.9]))
    for plot in plots:
        old, new = base.metric_chart(plot, before, x), base.metric_chart(plot, after, x)
        assert (json.dumps(old.spec), old.alt) == (json.dumps(new.spec), new.alt)


@pytest.mark.parametrize(
    ("plots", "reported", "keys"),
    [
        (curves.LOOK_AHEAD, ["grad/norm_g0"], ["norms"]),
        (curves.POLICY, ["policy/entropy"], ["entropy"]),
        (curves.POLICY, ["policy/entropy", "env/turns_mean", "env/done_fraction"], ["entropy", "turns", "episodes"]),
        (curves.SYSTEM, ["system/cpu_percent", "system/memory_bytes"], ["memory", "cpu"]),
        (curves.SYSTEM, ["time/learner_idle_fraction"], ["overlap"]),
    ],
)
def test_only_charts_of_reported_metrics_appear(plots: tuple[Plot, ...], reported: list[str], keys: list[str]) -> None:
    series = {name: points([1.0]) for name in reported}
    assert [chart.key for chart in base.metric_charts(plots, series, "step")] == keys


def test_the_system_part_shows_gpu_disk_and_network_where_a_run_reports_them() -> None:
    gpus = {f"system/gpu{n}/{name}" for n in (0, 1) for name in ("utilization_percent", "memory_bytes")}
    traffic_and_disk = [name for plot in curves.SYSTEM[-2:] for name in plot.metrics]
    reported = {name: points([2.0**20]) for name in (*gpus, *traffic_and_disk)}
    gpu_memory, gpu, traffic, disk = base.metric_charts(curves.SYSTEM, reported, "step")
    assert (gpu_memory.key, gpu.key, traffic.key, disk.key) == ("gpu-memory", "gpu", "traffic", "disk")
    assert gpu.alt == "GPUs: GPU 0, GPU 1 over training step"
    assert "GPU 1 1.0 MiB" in gpu_memory.summary
    assert "network, sent 1.0 MiB per second" in traffic.summary


def test_lines_differ_in_more_than_colour() -> None:
    names = [f"series {i}" for i in range(8)]
    styles = base.line_styles(names, marks=True)
    assert len({tuple(style) for style in styles["strokeDash"]["scale"]["range"]}) == 8
    assert len(set(styles["shape"]["scale"]["range"])) == 8


def test_of_many_points_only_some_answer_to_the_pointer() -> None:
    chart = drawn({"a": points([0.5] * 2500)}, {"a": "A"})
    line, dots = chart.spec["layer"]
    assert (line["data"]["name"], dots["data"]["name"]) == ("points", "near")
    assert len(chart.points) == 2500
    # Every fifth of 2500.
    assert chart.datasets["near"]["step"].tolist() == list(range(1, 2501, 5))
    few = base.near(chart.points.head(500))
    assert len(few) == 500


def test_long_names_take_fewer_columns() -> None:
    def columns(name: str) -> int:
        legend = base.legend([name, "b"])
        assert legend is not None
        return int(legend["columns"])

    assert [columns("a"), columns("a" * 20), columns("a" * 30), columns("a" * 60)] == [4, 3, 2, 1]
    assert base.legend(["alone"]) is None


NAMES = ["time/step_s", "gate/z", "gate/value", "reward/mean"]


def test_metrics_match_their_group_and_every_word_of_a_search_in_any_order() -> None:
    assert matching(NAMES, "gate", "") == ["gate/value", "gate/z"]
    assert matching(NAMES, "", "step TIME") == ["time/step_s"]
    assert matching(NAMES, "gate", "mean") == []


def test_averages_arrive_from_the_service_and_the_note_gives_their_weight() -> None:
    points = Points([1, 2], [1.0, 2.0], [0.0, 4.0])
    plain, average = (explorer_chart({"reward/mean": {"a": points}}, ["a"], "step", weight) for weight in (0.0, 0.9))
    assert average.points["y"].tolist() == [0.0, 4.0]
    assert "Exponential average over all steps, weight 0.9" in average.note
    assert "average" not in plain.note


def test_a_thinned_series_is_named_below_the_chart_and_in_its_table() -> None:
    series = {"a": Points([1, 9], [1.0, 9.0], [0.0, 4.0], EXTREMES), "b": Points([1], [1.0], [2.0])}
    chart = explorer_chart({"reward/mean": series}, ["a", "b"], "step")
    assert chart.thinned == EXTREMES
    assert chart.text.endswith("Thinned to minima and maxima; the export in Compare has every step.")
    assert set(chart.table()["Thinned to"]) == {EXTREMES}
    whole = explorer_chart({"reward/mean": {"b": series["b"]}}, ["b"], "step")
    assert (whole.thinning, "Thinned to" in whole.table()) == ("", False)


def test_explored_time_is_in_hours_and_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    series = Points([1, 2, 3], [5400.0, 10800.0, 16200.0], [0.5, 0.0, -1.0])
    frame = explorer_chart({"reward/mean": {"a": series}}, ["a"], "time", log=True).points
    assert frame["x"].tolist() == [1.5, 3.0, 4.5]
    assert frame["y"][0] == 0.5
    assert frame["y"][1:].isna().all()


def test_rows_share_pointer_zoom_and_legend_and_new_data_keeps_the_specification() -> None:
    def chart(num: int) -> object:
        series = {"a": Points([1] * num, [1.0] * num, [1.0] * num), "b": Points([1], [1.0], [2.0])}
        return explorer_chart({"gate/z": series, "reward/mean": series}, ["a", "b"], "step").spec

    spec = explorer_chart({"gate/z": {}, "reward/mean": {}}, ["a", "b"], "step").spec
    names = {layer["name"] for row in spec["vconcat"] for layer in row["layer"] if "name" in layer}
    assert {view for param in spec["params"] for view in param.get("views", [])} <= names
    assert [param["name"] for param in spec["params"]] == ["zoom", "hover", "selected"]
    assert json.dumps(chart(1)) == json.dumps(chart(3))
