"""Responses and evaluations of a run."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.orm import Session

from gxpo_services.api.errors import FieldError, Invalid
from gxpo_services.api.existing_run import run_number
from gxpo_services.db.tables.samples import Sample
from gxpo_services.samples import repository
from gxpo_services.samples.schemas import EvaluationsView, SamplePage, SampleView

_CURSOR = re.compile(r"[0-9]{1,18}")


def samples(
    session: Session, run_id: str, *, step: int | None, verdict: str | None, limit: int, cursor: str | None
) -> SamplePage:
    """Raises NotFound, Invalid for a cursor that is none of ours."""
    number = run_number(session, run_id)
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        message = "is not a cursor; pass next_cursor of an earlier response unchanged"
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


def _sample(row: Sample) -> SampleView:
    values: dict[str, Any] = {name: getattr(row, name) for name in SampleView.model_fields if hasattr(row, name)}
    return SampleView(**values, group=row.group_index, sample=row.sample_index)
