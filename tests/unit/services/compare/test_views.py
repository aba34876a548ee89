"""What the API shows of a comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gxpo_services.compare import schemas
from gxpo_services.compare.schemas import compared_group, curve_view, gate_view
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


def test_a_curve_has_its_costs_its_average_and_its_band() -> None:
    shown = curve_view(curve(0.2, 0.4, 0.5), 0.5, (np.array([0.0, 0.1, 0.2]), np.array([0.5, 0.6, 0.7])))
    assert (shown.steps, shown.backward_passes) == ([0, 10, 20], [0, 30, 60])
    assert (shown.hours, shown.tokens) == ([0, 0.1, 0.2], [0, 70, 140])
    assert shown.smoothed == pytest.approx([0.2, 0.3, 0.4])
    assert (shown.low, shown.high) == ([0.0, 0.1, 0.2], [0.5, 0.6, 0.7])


def test_a_gate_says_whether_it_was_thinned() -> None:
    trace = GateTrace(np.arange(10.0), np.array([0, 1, 5, 1, 0, -4, 0, 1, 2, 1.0]), 0.5, 7, True)
    whole, thinned = gate_view(trace, 10), gate_view(trace, 6)
    assert (len(whole.z), whole.downsampled) == (10, False)
    assert len(thinned.z) <= 6
    assert thinned.downsampled
    assert {5.0, -4.0} <= set(thinned.z)
    assert [trace.z[int(step)] for step in thinned.steps] == thinned.z
    assert (thinned.threshold, thinned.shutoff_step, thinned.two_sided) == (0.5, 7, True)


def test_a_configuration_shows_its_runs_in_the_order_of_their_seeds() -> None:
    base = SeedGroup("GRPO", (run(0, 0.2, 0.4), run(1, 0.2, 0.5)))
    other = SeedGroup("GXPO", (run(0, 0.2, 0.6, rule="GXPO"), run(1, 0.1, 0.2, rule="GXPO")))
    comparison = compare_groups([base, other], "GRPO")
    rows = {
        one: stored(f"{group.name}-{one.seed}", "g" if one.seed else None)
        for group in (base, other)
        for one in group.runs
    }
    first, second = (compared_group(group, comparison.group(group.name), comparison, rows) for group in (base, other))
    assert (first.is_baseline, second.is_baseline) == (True, False)
    assert (second.name, second.rule, second.seeds) == ("GXPO", "GXPO", [0, 1])
    assert [one.id for one in second.runs] == ["id-GXPO-0", "id-GXPO-1"]
    assert [one.group for one in second.runs] == [None, "g"]
    assert second.mean.accuracy == pytest.approx([0.15, 0.4])
    assert second.runs[0].match is not None
    assert second.runs[1].match is None
    # One run's band is the interval over problems.
    assert second.runs[0].curve.low == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize(("gates", "points"), [(1, 500), (4, 500), (6, 400), (100, 60)])
def test_the_points_of_all_gates_share_one_limit(gates: int, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(schemas, "thin", lambda values, most: (seen.append(most), np.arange(len(values)))[1])
    long = GateTrace(np.arange(3.0), np.arange(3.0))
    group = SeedGroup("GRPO", (run(999, 0.1, 0.2), *(run(seed, 0.1, 0.2, gate=long) for seed in range(gates))))
    comparison = compare_groups([group], "GRPO")
    compared_group(group, comparison.group("GRPO"), comparison, {one: stored("x") for one in group.runs})
    assert set(seen) == {points}
