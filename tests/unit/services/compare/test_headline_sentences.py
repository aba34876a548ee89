"""What the service says and shows of comparisons: headlines, views, exported files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gxpo_services.compare.export import write_rows
from gxpo_services.compare.headline import (
    comparison_sentence,
    evaluation_sentence,
    gate_sentence,
    signal_sentence,
    state_sentence,
)
from gxpo_services.compare.schemas import compared_group, curve_view, gate_view
from gxpo_services.local.demo import TASKS
from gxpo_services.outputs.metrics import Summary
from gxpo_services.run_states import RunState
from gxpo_services.runs.schemas import Progress, RunView
from gxpo_trainer.compare.curves import EvaluationCurve, GateTrace, RunCurves
from gxpo_trainer.compare.groups import compare_groups
from gxpo_trainer.compare.seeds import SeedGroup, condition_settings
from gxpo_trainer.config.io import load_preset


def view(state: str, steps: int = 12, **fields: Any) -> RunView:
    place = fields.pop("position", 2)
    progress = Progress.model_construct(steps=steps, step_budget=fields.pop("of", 40), queue_position=place)
    known: dict[str, Any] = {"reason": None, "detail": "", "phase": None, "recoveries": 0, "silent_s": None}
    return RunView.model_construct(state=RunState(state), progress=progress, **(known | fields))


def test_groups_are_shown_with_the_baseline_marked_and_gates_thinned() -> None:
    def group(name: str, end: float) -> SeedGroup:
        costs, unknown, z = np.array([0.0, 10.0]), np.full(2, np.nan), np.arange(200.0 + (name == "GXPO"))
        curve = EvaluationCurve(costs, costs, costs, costs, np.array([0.1, end]), unknown, unknown)
        return SeedGroup(name, (RunCurves(name, "gxpo", 3, curve, GateTrace(z, z)),))

    groups = [group("GRPO", 0.5), group("Epochs", 0.4), group("GXPO", 0.6)]
    run: Any = SimpleNamespace(
        id="r1", name="a", state="succeeded", group_values=None, group=SimpleNamespace(id="g1"), config={}
    )
    comparison = compare_groups(groups, "GRPO")
    shown = [compared_group(group, comparison, {group.runs[0]: run}, 0.0) for group in groups]
    assert [(one.is_baseline, one.rule) for one in shown] == [(True, "gxpo"), (False, "gxpo"), (False, "gxpo")]
    assert [one.runs[0].gate.downsampled for one in shown] == [False, False, True]
    (seed,) = shown[2].runs
    assert (seed.id, seed.seed, seed.group, seed.curve.accuracy) == ("r1", 3, "g1", [0.1, 0.6])


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (view("queued", 0), "Queued at position 2."),
        (view("queued", 0, position=None), "Queued."),
        (view("starting", 0, phase="waiting for 3 GPUs"), "Starting: waiting for 3 GPUs."),
        (view("running", 0), "Running: step 0 of 40."),
        (view("running", 5000, of=None, phase="evaluating"), "Running: step 5,000, evaluating."),
        (view("running", phase="training", silent_s=42.0), "Running: step 12 of 40, no heartbeat for 42 s."),
        (view("recovering", recoveries=1), "Recovering: step 12 of 40. Recovered 1×."),
        (view("cancelled", 0), "Cancelled before the first step."),
        (view("succeeded", 30, reason="budget_reached"), "Finished at step 30 of 40: budget reached."),
        (view("failed", 3, reason="out_of_memory", detail="rank 0:\n  raise <b>it</b>"),
         "Failed at step 3 of 40: out of memory. rank 0: raise <b>it</b>"),
    ],
)  # fmt: skip
def test_a_state_is_told_with_its_step_and_reason(run: RunView, sentence: str) -> None:
    assert state_sentence(run) == sentence
    assert state_sentence(view("queued"), ["a", "b"]) == "Queued at position 2; resources are held by a and b."


def last(value: float | None, step: int = 9, low: float | None = None, high: float | None = None) -> Summary:
    return Summary(value, step, low, high)


TAU = {"gate/threshold": last(3.0)}
Z = {"gate/z": last(0.1, low=-3.44, high=2.5)}
FIRED = {"gate/shutoff_step": last(1200.0)}


@pytest.mark.parametrize(
    ("gate", "metrics", "ended", "sentence"),
    [
        (None, TAU | Z, True, ""),
        ({}, {}, False, ""),
        ({}, TAU, False, "The gate is in its warm-up."),
        ({}, TAU | {"gate/z": last(None)}, True, "The gate did not leave its warm-up."),
        ({}, TAU | Z, False, "The gate has not fired (largest z 2.5, τ 3)."),
        ({}, TAU | Z, True, "The gate did not fire (largest z 2.5, τ 3)."),
        ({"two_sided": True}, TAU | Z, True, "The gate did not fire (largest |z| 3.44, τ 3)."),
        ({"mode": "rearm"}, TAU | Z | FIRED | {"gate/active": last(1.0)}, False,
         "The gate fired at step 1,200 (largest z 2.5, τ 3); the look-ahead is on again."),
        ({}, TAU | Z | FIRED | {"gate/active": last(0.0)}, False,
         "The gate fired at step 1,200 (largest z 2.5, τ 3)."),
        ({"mode": "never"}, TAU | Z, True, "The gate cannot fire (largest z 2.5)."),
        ({}, {"gate/threshold": last(math.inf)}, True, "The gate cannot fire."),
        # A negative τ fires at the first z that is large enough.
        ({}, {"gate/threshold": last(-1.0), "gate/z": last(-2.0, low=-2.0, high=-1.5)}, False,
         "The gate has not fired (largest z −1.5, τ −1)."),
    ],
)  # fmt: skip
def test_a_gate_is_told_with_its_largest_z(
    gate: dict[str, Any] | None, metrics: dict[str, Summary], ended: bool, sentence: str
) -> None:
    assert gate_sentence({"name": "gxpo", "gate": gate}, metrics, ended) == sentence


def curve(passes: Sequence[float], accuracy: Sequence[float]) -> EvaluationCurve:
    unknown = np.full(len(passes), np.nan)
    steps = 10.0 * np.arange(len(passes))
    return EvaluationCurve(steps, np.array(passes), unknown, unknown, np.array(accuracy), unknown, unknown)


def test_an_evaluation_is_told_with_its_cost_and_a_higher_one_before_it() -> None:
    some = {"reward/mean": last(0.5)}
    for made, sentence in (
        (curve([0.0], [0.125]), "12.5% before the first step."),
        (curve([0.0, 30.0], [0.125, 0.8671]), "86.7% after 30 backward passes."),
        (curve([0.0, 30.0, 1200.0], [0.1, 0.5, 0.4]), "40.0% after 1,200 backward passes; best 50.0% after 30 backward "
         "passes."),
        (curve([0.0, 30.0], [0.5, 0.4]), "40.0% after 30 backward passes; best 50.0% before the first step."),
        (curve([math.nan, math.nan], [0.5, 0.6]), "60.0% at step 10."),
    ):  # fmt: skip
        assert evaluation_sentence(made, some, ended=True) == sentence
    assert evaluation_sentence(None, {}, ended=False) == ""
    assert evaluation_sentence(None, some, ended=False) == "No evaluation yet."
    assert evaluation_sentence(None, some, ended=True) == "It was not evaluated."
    # A supervised run has its loss.
    assert evaluation_sentence(None, {"policy/loss": last(1.23456, 30)}, ended=True) == "Loss 1.23 at step 30."
    assert evaluation_sentence(None, {"policy/loss": last(None)}, ended=True) == "It was not evaluated."
    both = {"policy/loss": last(0.1), "reward/mean": last(0.5)}
    assert evaluation_sentence(None, both, ended=True) == "It was not evaluated.", "a surrogate's loss tells nothing"


def test_a_run_is_compared_with_its_best_baseline_at_equal_passes() -> None:
    own = curve([0, 30, 60], [0.1, 0.4, 0.7])
    short, whole = curve([0, 15, 30], [0.1, 0.2, 0.414]), curve([0, 30, 60], [0.1, 0.2, 0.69])
    # At 30 passes 40% against 41.4%; at 60 passes 70% against 69%.
    assert comparison_sentence(own, {"a": ("GRPO", short)}) == (
        "After 30 backward passes it was 1.4 points below GRPO with the same seed.", "a"
    )  # fmt: skip
    assert comparison_sentence(own, {"b": ("GRPO", whole)}) == ("This is 1.0 point above GRPO with the same seed.", "b")
    found = comparison_sentence(own, {"a": ("GRPO", short), "b": ("GRPO lr 2e-05", whole)})
    assert found == ("This is 1.0 point above GRPO lr 2e-05, the best of 2 baselines, with the same seed.", "b")
    # One that is only at its start, and one of unknown cost.
    for other in (curve([0], [0.1]), curve([math.nan] * 3, [0.1, 0.2, 0.3])):
        assert comparison_sentence(own, {"a": ("GRPO", other)}) == ("", "")
    assert comparison_sentence(curve([0, 90], [0.1, 0.9]), {"a": ("GRPO", short)}) == ("", ""), "its start alone"
    assert comparison_sentence(own, {}) == comparison_sentence(None, {"a": ("GRPO", short)}) == ("", "")


def test_the_runs_of_each_demo_are_comparable() -> None:
    """Their rules, learning rates and schedules of evaluation differ."""
    for task in TASKS.values():
        first, *others = (condition_settings(load_preset(name).model_dump(mode="json")) for name in task.presets)
        assert all(other == first for other in others), task.title
        assert "data.source" in first


def test_no_signal_is_told_while_the_latest_step_has_none() -> None:
    assert signal_sentence({"reward/mean": last(0.5)}) == ""
    assert signal_sentence({"reward/mean": last(0.0, 9), "reward/no_signal": last(1.0, 8)}) == ""
    assert signal_sentence({"reward/mean": last(0.0, 9), "reward/no_signal": last(1.0, 9)}).startswith("No signal:")


# What the API shows of a comparison.


def test_a_gate_says_whether_it_was_thinned() -> None:
    trace = GateTrace(np.arange(10.0), np.array([0, 1, 5, 1, 0, -4, 0, 1, 2, 1.0]), 0.5, 7, True)
    whole, thinned = gate_view(trace, 10), gate_view(trace, 6)
    assert (len(whole.z), whole.downsampled) == (10, False)
    assert len(thinned.z) <= 6
    assert thinned.downsampled
    assert {5.0, -4.0} <= set(thinned.z)
    assert [trace.z[int(step)] for step in thinned.steps] == thinned.z
    assert (thinned.threshold, thinned.shutoff_step, thinned.two_sided) == (0.5, 7, True)
    bounds = {"ci_low": np.array([0.05, 0.4]), "ci_high": np.array([0.2, 0.6])}
    drawn = curve_view(replace(curve([0.0, 30.0], [0.1, 0.5]), **bounds), 0.0)
    assert (drawn.low, drawn.high, drawn.accuracy, drawn.smoothed) == ([0.05, 0.4], [0.2, 0.6], *[[0.1, 0.5]] * 2)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_csv_is_a_formula(text: str) -> None:
    """A spreadsheet runs such a cell, and names are free text of other people. Numbers keep their sign."""
    row = {"name": text, "step": -1, "value": -0.5}
    _, line = write_rows("csv", list(row), [[row]])
    assert line.decode().startswith((f"'{text},-1,-0.5", f'"\'{text}",-1,-0.5'))
    (line,) = write_rows("jsonl", list(row), [[row]])
    assert json.loads(line) == row
