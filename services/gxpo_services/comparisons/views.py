"""Comparison results to API views. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_services.comparisons.schemas import ComparedGroup, ComparedRun, CurveView, GateView
from gxpo_services.db.tables.runs import Run
from gxpo_services.metrics.downsample import thin
from gxpo_trainer.compare.curves import AXES, EvaluationCurve, GateTrace, RunCurves, mean_curve, smooth
from gxpo_trainer.compare.groups import Comparison, GroupResult, SeedResult
from gxpo_trainer.compare.seeds import SeedGroup, seed_band

_GATE_POINTS = 2400
"""Total number of gate points in a response."""
_FEWEST_OF_ONE, _MOST_OF_ONE = 60, 500


def compared_group(
    group: SeedGroup, result: GroupResult, comparison: Comparison, rows: Mapping[RunCurves, Run]
) -> ComparedGroup:
    """rows: every run of the comparison."""
    curve = mean_curve([run.curve for run in group.runs])
    band = seed_band(group, curve, comparison.level)
    gates = sum(len(run.gate.z) > 0 for run in rows)
    points = min(_MOST_OF_ONE, max(_FEWEST_OF_ONE, _GATE_POINTS // max(1, gates)))
    own = {name: getattr(result, name) for name in ComparedGroup.model_fields if hasattr(result, name)}
    return ComparedGroup.model_validate(
        own
        | {
            "rule": group.runs[0].rule,
            "is_baseline": group.name == comparison.baseline,
            "mean": curve_view(curve, comparison.smoothing, band),
            "runs": [
                _compared_run(run, seed, rows[run], comparison.smoothing, points)
                for run, seed in zip(group.runs, result.by_seed, strict=True)
            ],
        }
    )


def curve_view(curve: EvaluationCurve, smoothing: float, band: Sequence[Any]) -> CurveView:
    """band: lower and upper bounds."""
    costs = {axis: curve.cost(axis).tolist() for axis in AXES}
    return CurveView(
        **costs,
        accuracy=curve.accuracy.tolist(),
        smoothed=smooth(curve.accuracy, smoothing).tolist(),
        low=band[0].tolist(),
        high=band[1].tolist(),
    )


def gate_view(gate: GateTrace, most: int) -> GateView:
    """A gate trace thinned to at most `most` points."""
    kept = thin(gate.z, most)
    return GateView(
        steps=gate.steps[kept].tolist(),
        z=gate.z[kept].tolist(),
        threshold=gate.threshold,
        shutoff_step=gate.shutoff_step,
        two_sided=gate.two_sided,
        downsampled=len(kept) < len(gate.z),
    )


def _compared_run(curves: RunCurves, result: SeedResult, run: Run, smoothing: float, gate_points: int) -> ComparedRun:
    return ComparedRun.model_validate(
        {
            "id": run.id,
            "name": run.name,
            "state": run.state,
            "seed": curves.seed,
            "group": run.group.id if run.group else None,
            "group_values": run.group_values,
            "curve": curve_view(curves.curve, smoothing, (curves.curve.ci_low, curves.curve.ci_high)),
            "gate": gate_view(curves.gate, gate_points),
            **{name: getattr(result, name) for name in ("peak", "target", "match", "speed_ups")},
        }
    )
