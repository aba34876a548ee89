"""Spans of several steps on one axis."""

from __future__ import annotations

from gxpo_dashboard.charts import steps
from gxpo_dashboard.view_models.series import Points

STEPS = [
    {"step": 7, "begin": 100.0, "spans": [
        {"process": "engine 0", "activity": "sampling", "begin": 0.0, "end": 2.0},
        {"process": "learner", "activity": "updating", "begin": 2.0, "end": 4.0},
    ]},
    {"step": 8, "begin": 104.0, "spans": [{"process": "engine 0", "activity": "syncing", "begin": 0.5, "end": 1.0}]},
]  # fmt: skip


def test_seconds_count_from_the_first_step() -> None:
    rows = steps.spans_frame(STEPS).values.tolist()
    assert rows == [
        ["engine 0", "sampling", 0.0, 2.0, 7],
        ["learner", "updating", 2.0, 4.0, 7],
        ["engine 0", "syncing", 4.5, 5.0, 8],
    ]


def test_the_learner_comes_first_and_the_words_say_who_was_busy() -> None:
    chart = steps.timeline_chart(STEPS)
    assert chart.spec["layer"][0]["encoding"]["y"]["sort"] == ["learner", "engine 0"]
    # 2.5 of 5 seconds and 2 of 5.
    assert chart.summary == "Busy over the last 2 steps: engine 0 50%, learner 40%."


def test_runs_without_a_timeline_or_staleness_say_so() -> None:
    assert steps.timeline_chart([]).summary == "No timeline yet."
    strict = {"time/learner_idle_fraction": Points([1], [1.0], [0.25])}
    assert [chart.key for chart in steps.overlap_charts(strict, "step")] == ["overlap"]
