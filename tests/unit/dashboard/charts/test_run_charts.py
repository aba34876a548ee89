"""Plain metric charts: what is there is drawn, what is not is left out, and data never enters the specification."""

from __future__ import annotations

import json
import math

import pytest

from gxpo_dashboard.charts import base, curves
from gxpo_dashboard.charts.base import heading
from gxpo_dashboard.view_models.series import Points


def points(y: list[float], x: list[float] | None = None) -> Points:
    steps = list(range(1, len(y) + 1))
    return Points(steps, x or [float(step) for step in steps], y)


def test_metrics_without_a_point_are_left_out() -> None:
    chart = base.metric_chart("k", "t", {"a": points([1.0]), "b": Points()}, {"a": "A", "b": "B"}, y_title="y")
    assert chart.datasets["points"]["series"].tolist() == ["A"]
    assert chart.summary == "At step 1: A 1."


def test_the_table_has_a_column_for_each_series() -> None:
    series = {"a": points([1.0, 2.0]), "b": points([3.0, 4.0])}
    table = base.metric_chart("k", "t", series, {"b": "B", "a": "A"}, y_title="y").table()
    assert table.to_dict("list") == {"Training step": [1.0, 2.0], "B": [3.0, 4.0], "A": [1.0, 2.0]}


def test_the_table_over_a_cost_keeps_the_steps() -> None:
    series = {"a": points([1.0, 2.0], [100.0, 250.0])}
    table = base.metric_chart("k", "t", series, {"a": "A"}, x="tokens", y_title="y").table()
    assert table.to_dict("list") == {"Sampled tokens": [100.0, 250.0], "Step": [1, 2], "A": [1.0, 2.0]}


def test_headers_are_in_sentence_case_and_names_stay() -> None:
    assert [heading(label) for label in ("training step", "z-score", "pass@1", "95% low", "")] == [
        "Training step", "z-score", "pass@1", "95% low", ""
    ]  # fmt: skip


def test_what_is_not_positive_has_no_place_on_a_logarithmic_axis() -> None:
    chart = base.metric_chart("k", "t", {"a": points([1e-7, 0.0])}, {"a": "A"}, y_title="y", log=True)
    assert chart.datasets["points"]["y"][0] == 1e-7
    assert math.isnan(chart.datasets["points"]["y"][1])


def test_seconds_become_hours() -> None:
    chart = base.metric_chart("k", "t", {"a": points([1.0], [7200.0])}, {"a": "A"}, x="time", y_title="y")
    assert chart.datasets["points"]["x"].tolist() == [2.0]


def test_where_a_step_lies_on_another_axis() -> None:
    found = points([0.0] * 3, [3.0, 6.0, 7.0])
    assert base.value_at(found, 2, "backward_passes") == 6.0
    assert base.value_at(found, 9, "backward_passes") == 7.0
    assert math.isnan(base.value_at(found, 0, "backward_passes"))


@pytest.mark.parametrize("x", list(base.AXES))
def test_new_data_does_not_change_a_specification(x: str) -> None:
    before = {name: points([0.5]) for name in curves.NAMES}
    after = {name: points([0.5, 0.7, 0.9]) for name in curves.NAMES}
    for make in (curves.rule_charts, curves.policy_charts, curves.system_charts):
        for old, new in zip(make(before, x), make(after, x), strict=True):
            assert json.dumps(old.spec) == json.dumps(new.spec)
            assert old.alt == new.alt


def test_charts_of_another_rule_do_not_appear() -> None:
    assert [chart.key for chart in curves.rule_charts({"grad/norm_g0": points([1.0])}, "step")] == ["norms"]


def test_charts_of_an_environment_appear_only_where_there_is_one() -> None:
    single = {"policy/entropy": points([1.0])}
    assert [chart.key for chart in curves.policy_charts(single, "step")] == ["entropy"]
    several = {**single, "env/turns_mean": points([1.9]), "env/done_fraction": points([1.0])}
    assert [chart.key for chart in curves.policy_charts(several, "step")] == ["entropy", "turns", "episodes"]


def test_the_system_part_shows_gpu_disk_and_network_where_a_run_reports_them() -> None:
    plain = {"system/cpu_percent": points([50.0]), "system/memory_bytes": points([2.0**30])}
    assert [chart.key for chart in curves.system_charts(plain, "step")] == ["memory", "cpu"]
    gpus = {f"system/gpu{n}/{name}" for n in (0, 1) for name in ("utilization_percent", "memory_bytes")}
    reported = {name: points([2.0**20]) for name in (*gpus, *curves.TRAFFIC, *curves.DISK)}
    gpu_memory, gpu, traffic, disk = curves.system_charts(reported, "step")
    assert (gpu_memory.key, gpu.key, traffic.key, disk.key) == ("gpu-memory", "gpu", "traffic", "disk")
    assert gpu.alt == "GPUs: GPU 0, GPU 1 over training step"
    assert "GPU 1 1.0 MiB" in gpu_memory.summary
    assert "network, sent 1.0 MiB per second" in traffic.summary


def test_lines_differ_in_more_than_colour() -> None:
    names = [f"series {i}" for i in range(8)]
    assert len({tuple(style) for style in base.dash(names)["scale"]["range"]}) == 8
    assert len(set(base.shape(names)["scale"]["range"])) == 8


def test_a_legend_shows_points_by_their_shape_and_lines_by_their_stroke() -> None:
    names = ["a", "b"]
    lines, dots = base.line_layers(names, "step", base.y_encoding("y"), marks=True)
    assert lines["encoding"]["strokeDash"]["legend"] is None, "a dashed outline would spoil the shapes"
    assert "symbolType" not in dots["encoding"]["shape"]["legend"]
    assert dots["encoding"]["shape"]["legend"] == dots["encoding"]["color"]["legend"]
    plain = base.line_layers(names, "step", base.y_encoding("y"))[0]["encoding"]
    assert plain["strokeDash"]["legend"] == plain["color"]["legend"]
    assert plain["color"]["legend"]["symbolType"] == "stroke"


def test_of_many_points_only_some_answer_to_the_pointer() -> None:
    chart = base.metric_chart("k", "t", {"a": points([0.5] * 2500)}, {"a": "A"}, y_title="y")
    line, dots = chart.spec["layer"]
    assert (line["data"]["name"], dots["data"]["name"]) == ("points", "near")
    assert len(chart.datasets["points"]) == 2500
    # Every fifth of 2500.
    assert chart.datasets["near"]["step"].tolist() == list(range(1, 2501, 5))
    few = base.near(chart.datasets["points"].head(500))
    assert len(few) == 500


def test_the_first_and_the_last_point_are_not_cut_in_half() -> None:
    dots = base.line_layers(["a"], "step", base.y_encoding("y"), marks=True)[1]
    radius = math.sqrt(dots["mark"]["size"] / math.pi)
    assert dots["encoding"]["x"]["scale"]["padding"] > radius


def test_long_names_take_fewer_columns() -> None:
    def columns(name: str) -> int:
        found = base.legend([name, "b"])
        assert found is not None
        return int(found["columns"])

    assert [columns("a"), columns("a" * 20), columns("a" * 30), columns("a" * 60)] == [4, 3, 2, 1]
    assert base.legend(["alone"]) is None


def test_a_sparkline_keeps_its_ends() -> None:
    values = [float(value) for value in range(100)]
    found = curves.sparkline(values)
    assert (len(found), found[0], found[-1]) == (30, 0.0, 99.0)
    assert curves.sparkline([1.0]) == [1.0]
