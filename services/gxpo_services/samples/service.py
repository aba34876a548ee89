"""Responses, evaluations, events, logs and checkpoints of a run, for those who look."""

from __future__ import annotations

import re
from typing import Any, BinaryIO

from sqlalchemy.orm import Session

from gxpo_services.db import Database
from gxpo_services.errors import Conflict, FieldError, Invalid, NotFound
from gxpo_services.run_files import RunFiles
from gxpo_services.runs.states import TERMINAL
from gxpo_services.samples import checkpoints, log, repository
from gxpo_services.samples.models import Sample
from gxpo_services.samples.schemas import (
    CheckpointsView,
    CheckpointView,
    EvaluationsView,
    EventPage,
    EventView,
    LogView,
    SamplePage,
    SampleView,
)
from gxpo_services.settings import ServiceSettings

_CURSOR = re.compile(r"[0-9]{1,18}")


def run_number(session: Session, run_id: str) -> int:
    """Raises NotFound."""
    found = repository.find_run(session, run_id)
    if found is None:
        raise NotFound(f"there is no run {run_id}")
    return found[0]


def samples(
    session: Session, run_id: str, *, step: int | None, verdict: str | None, limit: int, cursor: str | None
) -> SamplePage:
    """Raises NotFound, Invalid for a cursor that is none of ours."""
    number = run_number(session, run_id)
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        message = "is no cursor; pass next_cursor of an earlier answer as it is"
        raise Invalid(f"cursor: {message}", errors=[FieldError(field="cursor", message=message)])
    rows = repository.samples(session, number, step=step, verdict=verdict, after=int(cursor or 0), limit=limit + 1)
    more = len(rows) > limit
    rows = rows[:limit]
    return SamplePage(
        items=[_sample(row) for row in rows],
        next_cursor=str(rows[-1].number) if more else None,
        steps=repository.sample_steps(session, number),
    )


def evaluations(
    session: Session, run_id: str, *, benchmark: str | None, after: int | None, per_problem: bool
) -> EvaluationsView:
    """Raises NotFound."""
    found = repository.evaluations(session, run_number(session, run_id), benchmark=benchmark, after=after)
    if not per_problem:
        found = [{name: value for name, value in record.items() if name != "per_problem"} for record in found]
    return EvaluationsView(items=found)


def events(session: Session, run_id: str, *, after: int, limit: int) -> EventPage:
    """Raises NotFound."""
    rows = repository.events(session, run_number(session, run_id), after=after, limit=limit)
    items = [EventView.model_validate(row, from_attributes=True) for row in rows]
    return EventPage(items=items, next_after=items[-1].number if items else after)


def read_log(settings: ServiceSettings, run_id: str, offset: int, limit: int) -> LogView:
    piece = log.read_log(RunFiles(settings.artifacts, run_id), offset, limit)
    return LogView(text=piece.text, offset=piece.offset, next_offset=piece.next_offset, size=piece.size)


def is_over(database: Database, run_id: str) -> bool:
    """Whether a run has ended, or is gone."""
    with database.reading() as session:
        found = repository.find_run(session, run_id)
    return found is None or found[1] in TERMINAL


def list_checkpoints(settings: ServiceSettings, run_id: str) -> CheckpointsView:
    found = checkpoints.checkpoints(RunFiles(settings.artifacts, run_id))
    best = checkpoints.best(found)
    items = [
        CheckpointView(
            step=checkpoint.step,
            score=checkpoint.score,
            size_bytes=checkpoint.size_bytes,
            created_at=checkpoint.created_at,
            best=checkpoint is best,
            newest=checkpoint is found[-1],
        )
        for checkpoint in found
    ]
    return CheckpointsView(items=items)


def open_policy(settings: ServiceSettings, run_id: str, step: int) -> list[tuple[str, BinaryIO]]:
    """Raises NotFound, Conflict."""
    try:
        return checkpoints.open_policy(RunFiles(settings.artifacts, run_id), step)
    except FileNotFoundError:
        raise NotFound(f"run {run_id} has no checkpoint of step {step} (any more)") from None
    except checkpoints.TooManyFiles as error:
        raise Conflict(str(error)) from None


def _sample(row: Sample) -> SampleView:
    values: dict[str, Any] = {name: getattr(row, name) for name in SampleView.model_fields if hasattr(row, name)}
    return SampleView(**values, group=row.group_index, sample=row.sample_index)
