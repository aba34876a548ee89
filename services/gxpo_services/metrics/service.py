"""Metric series of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.orm import Session

from gxpo_services.api.errors import Invalid, NotFound
from gxpo_services.metrics import repository
from gxpo_services.metrics.blocks import Records
from gxpo_services.metrics.downsample import thin
from gxpo_services.metrics.names import BACKWARD_PASSES, TOKENS, TRAINING_S
from gxpo_services.metrics.schemas import Axis

MOST_CURVES = 2_000
"""Curves in one answer: runs × metrics."""
_AXES: dict[Axis, str] = {
    "backward_passes": BACKWARD_PASSES,
    "time": TRAINING_S,
    "tokens": TOKENS,
}
Json = dict[str, Any]


def names(session: Session, run_id: str) -> list[str]:
    """Metrics that a run has. Raises NotFound."""
    return repository.names_of(session, _heads(session, [run_id])[run_id][0])


def curves(
    session: Session, run_ids: Sequence[str], metrics: Sequence[str], x: Axis, *, after: int | None, max_points: int
) -> dict[str, Json]:
    """MetricsView of each run; NaN and the infinities are floats yet. Raises NotFound, Invalid for too many curves."""
    run_ids, metrics = list(dict.fromkeys(run_ids)), list(dict.fromkeys(metrics))
    if len(run_ids) * len(metrics) > MOST_CURVES:
        raise Invalid(f"{len(run_ids)} runs × {len(metrics)} metrics exceed {MOST_CURVES} series; request fewer")
    heads = _heads(session, run_ids)
    firsts = repository.first_steps(session, [head[0] for head in heads.values()])
    numbers = repository.find_numbers(session, metrics)
    axis = repository.find_numbers(session, [_AXES[x]]) if x != "step" else {}
    # The whole axis: the last cost at or before a point may precede `after`.
    whole = {*numbers.values(), *axis.values()} if after is None else set(axis.values())
    read = repository.histories(session, whole, firsts) if whole else {}
    values = read if after is None else repository.histories(session, list(numbers.values()), firsts, after=after)
    costs = {run: records for (run, name), records in read.items() if name in axis.values()}
    answer: dict[str, Json] = {}
    for run_id in run_ids:
        number, last_step, attempt = heads[run_id]
        series = {}
        for name in metrics:
            records = values.get((number, numbers.get(name, -1)))
            series[name] = _series(records, x, costs.get(number), max_points)
        answer[run_id] = {
            "x": x,
            "run": run_id,
            "last_step": last_step,
            "attempt": attempt,
            # Every attempt but the first one replaces some history.
            "revision": len(firsts[number]),
            "series": series,
        }
    return answer


def _heads(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    found = repository.heads(session, run_ids)
    for run_id in run_ids:
        if run_id not in found:
            raise NotFound(f"there is no run {run_id}")
    return found


def _series(records: Records | None, x: Axis, costs: Records | None, max_points: int) -> Json:
    if records is None or len(records) == 0:
        return {"x": [], "y": [], "steps": [], "downsampled": False}
    steps, values = records["step"], records["value"]
    if x != "step":
        places = costs_at(steps, costs)
        known = np.isfinite(places)
        places, steps, values = places[known], steps[known], values[known]
    kept = thin(values, max_points)
    steps, chosen = steps[kept], values[kept]
    along = steps.tolist() if x == "step" else places[kept].tolist()
    return {"x": along, "y": chosen.tolist(), "steps": steps.tolist(), "downsampled": len(kept) < len(values)}


def costs_at(steps: npt.NDArray[np.int32], costs: Records | None) -> npt.NDArray[np.float64]:
    """Cumulative cost at each step: the last total at or before it, 0 at step 0, NaN where unknown."""
    found = np.where(steps == 0, 0.0, np.nan)
    if costs is None or len(costs) == 0:
        return found
    if np.array_equal(costs["step"], steps):
        return costs["value"].copy()
    index = np.searchsorted(costs["step"], steps, side="right") - 1
    return np.where(index >= 0, costs["value"][np.maximum(index, 0)], found)


def split_names(given: Sequence[str]) -> list[str]:
    """Names of repeated and comma-separated parameters. Raises Invalid."""
    found = [name for part in given for name in part.split(",") if name]
    if not found:
        raise Invalid.of("names", "is empty; name at least one metric")
    return found
