"""Findings of studies made by hand: runs that end early, and costs that are no whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.studies.data import MEDIANS, StudyData
from gxpo_trainer.studies.definition import RunKey, Study
from gxpo_trainer.studies.findings import ArmFindings, find
from gxpo_trainer.studies.report import compose, render_pictures

SEEDS = (0, 1, 2)


def curve(passes: Sequence[float], per_step: float, gain: float) -> EvaluationCurve:
    """Accuracy 0.2 and `gain` more each pass; a thousand tokens a step."""
    costs = np.array(passes, dtype=np.float64)
    steps, unknown = np.round(costs / per_step), np.full(costs.size, np.nan)
    return EvaluationCurve(steps, costs, steps / 60, 1000 * steps, 0.2 + gain * costs, unknown, unknown)


def data(curves: dict[str, EvaluationCurve], **changes: Any) -> StudyData:
    """A study in which every seed of an arm has this curve, a thousandth higher for each seed."""
    arms = {arm: {"label": arm.upper(), "overrides": []} for arm in curves}
    body = {
        "name": "small", "title": "Small", "baseline": "grpo", "arms": arms, "seeds": SEEDS, "backward_passes": 60,
        "evaluate_every": 2, "ladder": {"learning_rates": [1e-5], "seeds": [99], "backward_passes": 6},
        "analysis": {"targets": [0.6]},
    }  # fmt: skip
    runs, by_key = [], {}
    for arm, made in curves.items():
        for seed in changes.get("seeds", SEEDS):
            key = RunKey("report", arm, 1e-5, seed)
            values = dict.fromkeys(MEDIANS) | {"accuracy": 0.5, "peak": 0.5, "diverged": made.steps.size == 1}
            runs.append({"stage": "report", "arm": arm, "learning_rate": 1e-5, "seed": seed, "settings": ""} | values)
            own = replace(made, accuracy=made.accuracy + seed / 1000)
            by_key[key] = RunCurves(key.folder, arm, seed, own)
    return StudyData(Study.model_validate(body | changes), {}, runs, by_key)


def arm(found: Any, name: str) -> ArmFindings:
    return next(one for one in found.arms if one.arm == name)


def test_an_arm_that_diverges_before_its_second_evaluation_changes_no_other_arm() -> None:
    curves = {"grpo": curve(range(0, 61, 12), 1, 0.01), "gxpo": curve(range(0, 61, 2), 2, 0.01)}
    two, three = find(data(curves)), find(data(curves | {"sfpo": curve([0], 1, 0.01)}))
    for found in (two, three):
        gxpo = arm(found, "gxpo")
        # The plateau is at 36, 48 and 60 passes, or every two of them: 0.68. 60% of it is 0.408, at 24 passes for both.
        (reach,) = gxpo.sweep["backward_passes"]
        assert reach.first.mean == 1.0
        assert ("token_passes", 60_000.0) in gxpo.equal
        assert {axis: grid.tolist() for axis, grid in found.grids.items()}["backward_passes"] == [*range(0, 61, 12)]
    lost = arm(three, "sfpo")
    assert (lost.diverged, lost.equal, lost.against) == (3, {}, None)
    assert [reach.interpolated for reaches in lost.sweep.values() for reach in reaches] == [None] * 3


def test_an_arm_with_a_run_that_diverged_before_the_plateau_is_told_as_such() -> None:
    """SFPO needs 1/1.2 of the passes to the only target, and one of its seeds diverges after 20 of 60 passes."""
    curves = {"grpo": curve(range(0, 61, 2), 1, 0.01), "gxpo": curve(range(0, 61, 2), 2, 0.011)}
    made = data(curves | {"sfpo": curve(range(0, 61, 2), 1, 0.012)})
    key = RunKey("report", "sfpo", 1e-5, 1)
    made.curves[key] = replace(made.curves[key], curve=curve(range(0, 21, 2), 1, 0.012))
    # 60% of the best plateau is 0.438: the baseline is there at 24 passes of the grid, SFPO at 20.
    text = compose(made)
    assert "GRPO: its cost" in text
    assert "SFPO: its cost" not in text
    assert "nan" not in text
    assert "| SFPO | unknown, as a run ended before it | 1.20; " in text
    assert "- Without a plateau, as a run diverged or ended before it: SFPO." in text
    assert text.count("times fewer batches, plateau unknown, as a run ended before it)") == 1
    for tested in ([], ["gxpo"]):
        plan = {"targets": [0.6], "comparisons": tested}
        two = data(curves | {"sfpo": curve([0], 1, 0.01)}, analysis=plan)
        for seed, gain in enumerate((0.0100, 0.0104, 0.0106)):
            key = RunKey("report", "gxpo", 1e-5, seed)
            two.curves[key] = replace(two.curves[key], curve=curve(range(0, 61, 2), 2, gain))
        one = arm(find(two), "gxpo").against
        # The lost arm is one of the two comparisons, unless it was not registered.
        assert one.adjusted == pytest.approx((1 if tested else 2) * one.p_value)


def test_an_arm_that_was_never_evaluated_where_the_baseline_was_is_named() -> None:
    text = compose(data({"grpo": curve(range(0, 61, 2), 1, 0.01), "gxpo": curve([0, *range(1, 60, 2)], 1, 0.011)}))
    assert "- Never evaluated after as many passes as GRPO in the plateau: GXPO." in text
    assert "plateau not compared" in text
    assert "Without a plateau" not in text


def test_a_baseline_without_a_plateau_is_named_instead_of_the_other_arms() -> None:
    made = data({"grpo": curve(range(0, 61, 2), 1, 0.01), "gxpo": curve(range(0, 61, 2), 2, 0.011)})
    key = RunKey("report", "grpo", 1e-5, 1)
    made.curves[key] = replace(made.curves[key], curve=curve(range(0, 21, 2), 1, 0.01))
    ended = "- Without a plateau, as a run diverged or ended before it: GRPO; no plateau is compared.\n"
    assert ended in compose(made)


def test_targets_that_a_run_meets_before_training_do_not_void_the_others() -> None:
    """Seed s starts at 0.5 + s/1000 and rises by 0.004 a pass to 0.6, or 2 (1 + s/100) times as fast."""
    shares = [0.7, 0.8, 0.9, 0.95]
    pair = {"grpo": curve(range(0, 61, 2), 1, 0.01), "gxpo": curve(range(0, 61, 2), 1, 0.01)}
    made = data(pair, seeds=range(8), analysis={"targets": shares})
    for key, run in made.curves.items():
        gain = 0.004 * (2 * (1 + key.seed / 100) if key.arm == "gxpo" else 1)
        accuracy = np.minimum(0.6, 0.5 + gain * run.curve.backward_passes) + key.seed / 1000
        made.curves[key] = replace(run, curve=replace(run.curve, accuracy=accuracy))
    found = find(made)
    # The best plateau is 0.6035, so 70% and 80% are below the highest start, 0.507.
    assert found.targets == pytest.approx({0.9: 0.54315, 0.95: 0.573325})
    gxpo = arm(found, "gxpo")
    assert max(gxpo.fewer.values()) < 0.001
    ratio = 2 * np.prod([1 + seed / 100 for seed in range(8)]) ** (1 / 8)
    assert [reach.interpolated.mean for reach in gxpo.sweep["backward_passes"]] == pytest.approx([ratio, ratio])
    text = compose(made)
    assert "to every target from 90% to 95% of the best plateau: GXPO (2.1 to 2.1 times fewer batches, " in text
    assert text.count("| met at the start | met at the start | ") == 2 * 3
    for run in made.curves.values():
        run.curve.accuracy[0] = 0.6
    text = compose(made)
    assert "- Costs are not compared: every target is met at the start." in text
    assert "- GXPO: every target is met at the start; plateau " in text


def test_a_run_that_diverged_before_its_first_evaluation_is_an_outcome_of_its_arm() -> None:
    """One seed of SFPO has no curve; the arm is complete, counts for Holm's correction, and nothing is shown for it."""
    curves = {"grpo": curve(range(2, 61, 2), 1, 0.01), "gxpo": curve(range(2, 61, 2), 2, 0.01)}
    made = data(curves | {"sfpo": curve(range(2, 61, 2), 1, 0.012)})
    for seed, gain in enumerate((0.0100, 0.0104, 0.0106)):
        key = RunKey("report", "gxpo", 1e-5, seed)
        made.curves[key] = replace(made.curves[key], curve=curve(range(2, 61, 2), 2, gain))
    del made.curves[RunKey("report", "sfpo", 1e-5, 1)]
    made.reported("sfpo")[1]["diverged"] = True
    found = find(made)
    one, lost = arm(found, "gxpo").against, arm(found, "sfpo")
    assert found.missing == ()
    assert one.adjusted == pytest.approx(2 * one.p_value)
    assert (lost.seeds, lost.diverged, lost.equal, lost.against) == (SEEDS, 1, {}, None)
    text = compose(made)
    assert "SFPO collapsed in 0 and diverged in 1 of 3 runs" in text
    assert "- Without a plateau, as a run diverged or ended before it: SFPO." in text
    assert "| SFPO | unknown, as a run ended before it | – |" in text
    assert "Not complete yet" not in text
    assert len(render_pictures(made)) == 2
    del made.curves[RunKey("report", "grpo", 1e-5, 1)]
    assert "No result: a run of the baseline diverged before its first evaluation." in compose(made)


@pytest.mark.parametrize("per_step", [13 / 3, 7 / 6])
def test_equal_costs_are_found_where_passes_are_fractions(per_step: float) -> None:
    passes = np.cumsum([0, *[per_step] * 6])
    budget = round(passes[-1])
    assert passes[-1] != budget
    curves = {"grpo": curve(range(budget + 1), 1, 0.01), "sfpo": curve(passes, per_step, 0.02)}
    made = data(curves, backward_passes=budget, evaluate_every=1)
    one = arm(find(made), "sfpo").equal["backward_passes", budget]
    assert one.difference.mean == pytest.approx(0.01 * budget)
