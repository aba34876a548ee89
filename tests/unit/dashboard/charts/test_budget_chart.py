"""Backward passes by phase, compared with other rules; numbers by hand."""

from __future__ import annotations

import json

from gxpo_dashboard.charts import steps as budget
from gxpo_dashboard.charts.gate import FALLBACK, LOOK_AHEAD
from gxpo_dashboard.view_models.rules import Rules, rules_of
from gxpo_dashboard.view_models.series import Points
from gxpo_trainer.config import RunConfig

RULES = rules_of(RunConfig.model_json_schema())
GXPO = {"name": "gxpo", "k": 5, "probes": 2}


def points(steps: list[int], y: list[float]) -> Points:
    return Points(steps, [float(step) for step in steps], y)


# Three passes a step up to the step that fires (3), one a step from then on.
SHUT_OFF = {
    "update/backward_passes_total": points([1, 2, 3, 4, 5], [3, 6, 9, 10, 11]),
    "gate/active": points([1, 2, 3, 4, 5], [1, 1, 0, 0, 0]),
}


def test_the_step_that_fires_the_gate_still_looked_ahead() -> None:
    found = budget.passes_by_phase(SHUT_OFF, RULES.of(GXPO)).pivot(index="x", columns="series", values="y")
    assert list(found[LOOK_AHEAD]) == [3, 6, 9, 9, 9]
    assert list(found[FALLBACK]) == [0, 0, 0, 1, 2]


def test_phases_sum_to_the_total() -> None:
    found = budget.passes_by_phase(SHUT_OFF, RULES.of(GXPO)).groupby("x")["y"].sum()
    assert list(found) == [3, 6, 9, 10, 11]


def test_grpo_has_one_kind_of_step() -> None:
    found = budget.passes_by_phase({"update/backward_passes_total": points([1, 2], [1, 2])}, RULES.of({"name": "grpo"}))
    assert set(found["series"]) == {"GRPO steps"}


def test_a_gxpo_run_is_held_against_grpo_and_sfpo_of_its_depth() -> None:
    found = budget.others([0, 10], GXPO, RULES)
    last = dict(found[found["x"] == 10][["series", "y"]].to_numpy().tolist())
    assert last == {"GRPO (1 per step)": 10.0, "SFPO K=5 (6 per step)": 60.0}


def test_an_sfpo_run_is_held_against_grpo_and_gxpo() -> None:
    found = budget.others([4], {"name": "sfpo", "k": 3}, RULES)
    assert dict(found[["series", "y"]].to_numpy().tolist()) == {"GRPO (1 per step)": 4.0, "GXPO (3 per step)": 12.0}


def test_one_probe_costs_two_passes() -> None:
    found = budget.others([4], {"name": "sfpo", "k": 3, "probes": 1}, RULES)
    assert "GXPO (2 per step)" in set(found["series"])


def test_the_budget_is_a_line_and_a_word() -> None:
    chart = budget.budget_chart(SHUT_OFF, GXPO, 200.0, RULES)
    assert chart.datasets["limit"].to_dict("records") == [{"y": 200.0, "label": "budget 200"}]
    spent = f"11 backward passes of 200 after 5 steps (9 in {LOOK_AHEAD}, 2 in {FALLBACK})"
    assert chart.summary == f"{spent}. Others: GRPO (1 per step): 5, SFPO K=5 (6 per step): 30."
    assert budget.budget_chart(SHUT_OFF, GXPO, None, RULES).datasets["limit"].empty


def test_new_data_does_not_change_the_specification() -> None:
    short = {name: points(p.steps[:2], p.y[:2]) for name, p in SHUT_OFF.items()}
    before, after = budget.budget_chart(short, GXPO, 200.0, RULES), budget.budget_chart(SHUT_OFF, GXPO, 200.0, RULES)
    assert json.dumps(before.spec) == json.dumps(after.spec)


def test_a_rule_has_one_colour_and_dash_whichever_run_it_is_compared_with() -> None:
    def styles(settings: dict[str, object]) -> dict[str, tuple[str, list[int]]]:
        encoding = budget.budget_chart(SHUT_OFF, settings, None, RULES).spec["layer"][1]["encoding"]
        color, dash = encoding["color"]["scale"], encoding["strokeDash"]["scale"]
        return dict(zip(color["domain"], zip(color["range"], dash["range"], strict=True), strict=True))

    of_gxpo, of_grpo = styles(GXPO), styles({"name": "grpo"})
    assert of_gxpo["SFPO K=5 (6 per step)"] == of_grpo["SFPO K=3 (4 per step)"]
    assert of_grpo["SFPO K=3 (4 per step)"] != of_grpo["GXPO (3 per step)"]


def test_a_run_of_an_unknown_rule_has_its_own_passes_alone() -> None:
    chart = budget.budget_chart(SHUT_OFF, {"name": "other", "gate": {}}, None, Rules())
    assert chart.summary == f"11 backward passes after 5 steps (9 in {LOOK_AHEAD}, 2 in {FALLBACK})."


def test_without_a_step_it_says_so() -> None:
    chart = budget.budget_chart({}, GXPO, None, RULES)
    assert chart.empty
    assert chart.summary == "No steps yet."
