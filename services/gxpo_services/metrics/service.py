"""Metric series of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from gxpo_services.api.errors import Invalid, NotFound
from gxpo_services.metrics import repository
from gxpo_services.metrics.blocks import RECORD
from gxpo_services.metrics.names import BACKWARD_PASSES, TOKENS, TRAINING_S
from gxpo_services.metrics.schemas import Axis
from gxpo_services.metrics.series import Shape, series_of

MOST_CURVES = 2_000
"""Curves in one answer: runs × metrics."""
_AXES: dict[Axis, str] = {
    "backward_passes": BACKWARD_PASSES,
    "time": TRAINING_S,
    "tokens": TOKENS,
}
_NO_RECORDS = np.empty(0, dtype=RECORD)
Json = dict[str, Any]


def names(session: Session, run_id: str) -> list[str]:
    """Metrics that a run has. Raises NotFound."""
    return repository.names_of(session, _heads(session, [run_id])[run_id][0])


def curves(session: Session, run_ids: Sequence[str], metrics: Sequence[str], x: Axis, shape: Shape) -> dict[str, Json]:
    """MetricsView of each run; NaN and the infinities are floats yet. Raises NotFound, Invalid for too many curves."""
    run_ids, metrics = list(dict.fromkeys(run_ids)), list(dict.fromkeys(metrics))
    if len(run_ids) * len(metrics) > MOST_CURVES:
        raise Invalid(f"{len(run_ids)} runs × {len(metrics)} metrics exceed {MOST_CURVES} series; request fewer")
    heads = _heads(session, run_ids)
    firsts = repository.first_steps(session, [head[0] for head in heads.values()])
    numbers = repository.find_numbers(session, metrics)
    axis = repository.find_numbers(session, [_AXES[x]]) if x != "step" else {}
    all_steps = shape.after is None or shape.needs_all_steps
    # The whole axis: the last cost at or before a point may precede `after`.
    whole = {*numbers.values(), *axis.values()} if all_steps else set(axis.values())
    read = repository.histories(session, whole, firsts) if whole else {}
    values = read if all_steps else repository.histories(session, list(numbers.values()), firsts, after=shape.after)
    costs = {run: records for (run, name), records in read.items() if name in axis.values()}
    answer: dict[str, Json] = {}
    for run_id in run_ids:
        number, last_step, attempt = heads[run_id]
        histories = {name: values.get((number, numbers.get(name, -1)), _NO_RECORDS) for name in metrics}
        answer[run_id] = {
            "x": x,
            "run": run_id,
            "last_step": last_step,
            "attempt": attempt,
            # Every attempt but the first one replaces some history.
            "revision": len(firsts[number]),
            "series": series_of(histories, shape, costs.get(number), over_costs=x != "step"),
        }
    return answer


def _heads(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    found = repository.heads(session, run_ids)
    for run_id in run_ids:
        if run_id not in found:
            raise NotFound(f"there is no run {run_id}")
    return found


def split_names(given: Sequence[str]) -> list[str]:
    """Names of repeated and comma-separated parameters. Raises Invalid."""
    found = [name for part in given for name in part.split(",") if name]
    if not found:
        raise Invalid.of("names", "is empty; name at least one metric")
    return found
