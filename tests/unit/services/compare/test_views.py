"""What the API shows of a comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gxpo_services.compare import schemas
from gxpo_services.compare.schemas import compared_group, gate_view
from gxpo_trainer.compare.curves import EvaluationCurve, GateTrace, RunCurves
from gxpo_trainer.compare.groups import compare_groups
from gxpo_trainer.compare.seeds import SeedGroup


def curve(*accuracy: float) -> EvaluationCurve:
    steps = np.arange(len(accuracy)) * 10.0
    values = np.array(accuracy)
    return EvaluationCurve(steps, steps * 3, steps / 100, steps * 7, values, values - 0.1, values + 0.1)


def run(seed: int, *accuracy: float, gate: GateTrace | None = None, rule: str = "GRPO") -> RunCurves:
    return RunCurves(f"run-{seed}", rule, seed, curve(*accuracy), gate or GateTrace(np.empty(0), np.empty(0)))


def stored(name: str, group: str | None = None) -> Any:
    owner = None if group is None else SimpleNamespace(id=group)
    return SimpleNamespace(id=f"id-{name}", name=name, state="succeeded", group=owner, group_values={"k": 3})


def test_a_gate_says_whether_it_was_thinned() -> None:
    trace = GateTrace(np.arange(10.0), np.array([0, 1, 5, 1, 0, -4, 0, 1, 2, 1.0]), 0.5, 7, True)
    whole, thinned = gate_view(trace, 10), gate_view(trace, 6)
    assert (len(whole.z), whole.downsampled) == (10, False)
    assert len(thinned.z) <= 6
    assert thinned.downsampled
    assert {5.0, -4.0} <= set(thinned.z)
    assert [trace.z[int(step)] for step in thinned.steps] == thinned.z
    assert (thinned.threshold, thinned.shutoff_step, thinned.two_sided) == (0.5, 7, True)


@pytest.mark.parametrize(("gates", "points"), [(1, 500), (4, 500), (6, 400), (100, 60)])
def test_the_points_of_all_gates_share_one_limit(gates: int, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(schemas, "thin", lambda values, most: (seen.append(most), np.arange(len(values)))[1])
    long = GateTrace(np.arange(3.0), np.arange(3.0))
    group = SeedGroup("GRPO", (run(999, 0.1, 0.2), *(run(seed, 0.1, 0.2, gate=long) for seed in range(gates))))
    comparison = compare_groups([group], "GRPO")
    compared_group(group, comparison.group("GRPO"), comparison, {one: stored("x") for one in group.runs})
    assert set(seen) == {points}
