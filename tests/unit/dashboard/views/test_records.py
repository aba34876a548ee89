"""Header and log of the Run view."""

from __future__ import annotations

from typing import Any

from gxpo_dashboard.views.compare import gated_runs, with_own_evaluations
from gxpo_dashboard.views.records import in_context
from gxpo_dashboard.views.run import _figures

Json = dict[str, Any]


def run(state: str = "running", **progress: Any) -> Json:
    costs = {"steps": 3, "backward_passes": 9, "tokens": 100, "training_s": 75.0, "seconds_left": 90.0}
    return {"state": state, "score": 0.5, "score_best": None, "reward": 1.0, "progress": costs | progress}


def test_matches_of_a_log_are_marked_between_the_lines_around_them() -> None:
    lines = [f"line {number}" for number in range(12)]
    assert in_context(lines, "LINE 9") == (1, ["⋯", "  line 7", "  line 8", "▸ line 9", "  line 10", "  line 11"])
    assert in_context(lines, "line 1")[1][:4] == ["  line 0", "▸ line 1", "  line 2", "  line 3"]
    assert in_context(lines, "error") == (0, [])


def test_the_header_says_what_was_used_of_each_limit() -> None:
    assert _figures(run(), 0.3)[1:3] == ["**9** backward passes", "**1 min 15 s** training time"]
    assert _figures(run(backward_passes_budget=30), 0.3)[1] == "**9** of 30 backward passes"
    assert "**1 min 15 s** of 2 h 0 min training time" in _figures(run(hours_budget=2.0), 0.01)
    assert "**1 min 15 s** training time" in _figures(run(hours_budget="Infinity"), 0.01)


def test_the_header_has_the_time_left() -> None:
    assert _figures(run(), 0.3)[-1] == "**1 min 30 s** left"
    # The headline has the position in the queue.
    for without in (run(seconds_left=None), run("succeeded"), run("queued", queue_position=3, seconds_left=None)):
        assert "left" not in " ".join(_figures(without, 0.3))


# Which runs the view of comparisons asks for their scores, and for their gates.


def compared_run(group: str | None, **values: Any) -> dict[str, Any]:
    return {"group": group, "group_values": values or None}


def test_of_a_sweep_one_run_is_asked_and_of_single_runs_each() -> None:
    runs = {
        "a": compared_run("g1"),
        "b": compared_run("g1"),
        "c": compared_run(None),
        "d": compared_run(None),
        "e": compared_run("g2"),
        "f": compared_run("g2"),
    }
    assert with_own_evaluations(runs) == ["a", "c", "d", "e"]


def test_runs_of_a_sweep_that_are_evaluated_in_other_ways_are_asked_too() -> None:
    samples = "evaluation.samples_per_prompt"
    runs = {
        "a": compared_run("g", **{samples: 1, "learner.rule.k": 3}),
        "b": compared_run("g", **{samples: 1, "learner.rule.k": 5}),
        "c": compared_run("g", **{samples: 16, "learner.rule.k": 3}),
    }
    assert with_own_evaluations(runs) == ["a", "c"]


def test_each_configuration_has_its_first_gate_before_any_has_its_second() -> None:
    def runs(threshold: float | str | None, *ids: str) -> dict[str, Any]:
        return {"runs": [{"id": name, "gate": {"threshold": threshold}} for name in ids]}

    answer = {"groups": [runs(None, "grpo 0", "grpo 1"), runs(0.5, "a 0", "a 1", "a 2"), runs("Infinity", "b 0")]}
    assert gated_runs(answer) == ["a 0", "b 0", "a 1", "a 2"]
