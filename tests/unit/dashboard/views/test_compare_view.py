"""Which runs the view of comparisons asks for their scores, and for their gates."""

from __future__ import annotations

from typing import Any

from gxpo_dashboard.views.compare import gated_runs, with_own_evaluations


def run(group: str | None, **values: Any) -> dict[str, Any]:
    return {"group": group, "group_values": values or None}


def test_of_a_sweep_one_run_is_asked_and_of_single_runs_each() -> None:
    runs = {"a": run("g1"), "b": run("g1"), "c": run(None), "d": run(None), "e": run("g2"), "f": run("g2")}
    assert with_own_evaluations(runs) == ["a", "c", "d", "e"]


def test_runs_of_a_sweep_that_are_evaluated_in_other_ways_are_asked_too() -> None:
    samples = "evaluation.samples_per_prompt"
    runs = {
        "a": run("g", **{samples: 1, "learner.rule.k": 3}),
        "b": run("g", **{samples: 1, "learner.rule.k": 5}),
        "c": run("g", **{samples: 16, "learner.rule.k": 3}),
    }
    assert with_own_evaluations(runs) == ["a", "c"]


def test_each_configuration_has_its_first_gate_before_any_has_its_second() -> None:
    def runs(threshold: float | str | None, *ids: str) -> dict[str, Any]:
        return {"runs": [{"id": name, "gate": {"threshold": threshold}} for name in ids]}

    answer = {"groups": [runs(None, "grpo 0", "grpo 1"), runs(0.5, "a 0", "a 1", "a 2"), runs("Infinity", "b 0")]}
    assert gated_runs(answer) == ["a 0", "b 0", "a 1", "a 2"]
