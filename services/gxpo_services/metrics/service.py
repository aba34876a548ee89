"""What trainers report, and curves for those who look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.orm import Session

from gxpo_services.auth import same_hash
from gxpo_services.errors import Conflict, FieldError, Gone, Invalid, NotFound, TooLarge, Unauthorized
from gxpo_services.metrics import ingest, repository
from gxpo_services.metrics.batches import BadRow, Batch, TooManyRows, parse
from gxpo_services.metrics.blocks import Records
from gxpo_services.metrics.downsample import thin
from gxpo_services.metrics.schemas import Axis

ACTOR = "trainer"
_TAKES_NONE = "the run takes no reports: it has ended, waits for its next launch, or was deleted"
"""One answer for all of these: who has no token of the run learns nothing about it."""
MOST_CURVES = 2_000
"""Curves in one answer: runs × metrics."""
_AXES: dict[Axis, str] = {
    "backward_passes": ingest.BACKWARD_PASSES,
    "time": ingest.TRAINING_S,
    "tokens": ingest.TOKENS,
}
Json = dict[str, Any]


# ---- what trainers report --------------------------------------------------------------------------------------


def check_token(session: Session, run_id: str, token: str) -> None:
    """Whether a token is that of the run's present launch. Raises Gone, Unauthorized."""
    _check_owner(repository.run_secret(session, run_id), token)


def read_batch(body: bytes) -> Batch:
    """The batch in a body. Raises Invalid naming the row, TooLarge."""
    try:
        return parse(body)
    except BadRow as error:
        raise Invalid(str(error), errors=[FieldError(field=error.place, message=error.message)]) from None
    except TooManyRows as error:
        raise TooLarge(str(error)) from None


def receive(session: Session, run_id: str, token: str, batch: Batch) -> ingest.IngestAnswer:
    """Apply one call of a trainer. Raises Gone, Unauthorized; Conflict when lines are missing before it."""
    run = repository.lock_run(session, run_id)
    if run is None:
        raise Gone(_TAKES_NONE)
    # Looked at again under the lock: another launch may own the run by now.
    _check_owner(run.run_token_sha256, token)
    if batch.launch != run.launch:
        raise Unauthorized(f"launch {run.launch} owns the run now; launch {batch.launch} may not report any more")
    ingest.hear(session, run, ACTOR)
    try:
        answer = ingest.apply_batch(session, run, batch, ACTOR)
    except ingest.LinesMissing as error:
        raise Conflict("lines are missing before this batch; go on from `offsets`", offsets=error.offsets) from None
    if batch.number is None:
        return ingest.IngestAnswer(False, answer.offsets, answer.wish)
    return answer


def _check_owner(stored: str | None, token: str) -> None:
    if same_hash(token, stored):
        return
    if stored is None:
        raise Gone(_TAKES_NONE)
    raise Unauthorized("this is not the token of the run's present launch; another launch owns the run")


# ---- curves ----------------------------------------------------------------------------------------------------


def names(session: Session, run_id: str) -> list[str]:
    """Metrics that a run has. Raises NotFound."""
    return repository.names_of(session, _heads(session, [run_id])[run_id][0])


def curves(
    session: Session, run_ids: Sequence[str], metrics: Sequence[str], x: Axis, *, after: int | None, max_points: int
) -> dict[str, Json]:
    """MetricsView of each run; NaN and the infinities are floats yet. Raises NotFound, Invalid for too many curves."""
    run_ids, metrics = list(dict.fromkeys(run_ids)), list(dict.fromkeys(metrics))
    if len(run_ids) * len(metrics) > MOST_CURVES:
        raise Invalid(f"{len(run_ids)} runs × {len(metrics)} metrics are more than {MOST_CURVES} curves; ask for fewer")
    heads = _heads(session, run_ids)
    firsts = repository.first_steps(session, [head[0] for head in heads.values()])
    numbers = repository.find_numbers(session, metrics)
    axis = repository.find_numbers(session, [_AXES[x]]) if x != "step" else {}
    # Of the axis the whole: the newest cost at or before a point may lie before `after`.
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
            # Every attempt but the first one takes the place of something.
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
    """What was spent by each step: the newest total at or before it; nothing by step 0; NaN where it is not known."""
    found = np.where(steps == 0, 0.0, np.nan)
    if costs is None or len(costs) == 0:
        return found
    if np.array_equal(costs["step"], steps):
        return costs["value"].copy()
    index = np.searchsorted(costs["step"], steps, side="right") - 1
    return np.where(index >= 0, costs["value"][np.maximum(index, 0)], found)


def split_names(given: Sequence[str]) -> list[str]:
    """Names from repeated parameters, each of which may hold several between commas. Raises Invalid."""
    found = [name for part in given for name in part.split(",") if name]
    if not found:
        raise Invalid("names: name at least one metric", errors=[FieldError(field="names", message="is empty")])
    return found
