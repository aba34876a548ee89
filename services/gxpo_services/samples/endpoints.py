"""`/runs/{run_id}/samples` and `/runs/{run_id}/evaluations`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import StringConstraints

from gxpo_services.api.answers import plain_answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import Invalid, responses
from gxpo_services.api.existing_run import run_number
from gxpo_services.api.fields import MAX_STEP, RunId, Text
from gxpo_services.db.tables.samples import Sample
from gxpo_services.samples import repository
from gxpo_services.samples.schemas import EvaluationsView, SampleGroupView, SamplePage, SampleView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

_CURSOR = re.compile(r"([0-9]{1,10})-([0-9]{1,18})")
"""Step and number of a page's last sample."""
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Only this step.")]


@router.get("/samples", summary="Samples with verdicts")
def samples(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    step: Step = None,
    verdict: Annotated[
        Annotated[Text, StringConstraints(max_length=20)] | None, Query(description="Filter by verdict, e.g. `wrong`.")
    ] = None,
    group: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Only this prompt of each step.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[Annotated[Text, StringConstraints(max_length=40)] | None, Query()] = None,
) -> SamplePage:
    """Training samples of the effective history, newest step first, paged."""
    number = run_number(session, run_id)
    after = None if cursor is None else _position(cursor)
    rows = repository.newest_samples(
        session, number, step=step, verdict=verdict, group=group, after=after, limit=limit + 1
    )
    last = rows[limit - 1] if len(rows) > limit else None
    return SamplePage(
        items=[_view(row) for row in rows[:limit]],
        groups=[
            SampleGroupView.model_validate(count._asdict()) for count in repository.group_counts(session, rows[:limit])
        ],
        next_cursor=None if last is None else f"{last.step}-{last.number}",
        steps=repository.sample_steps(session, number),
    )


@router.get("/evaluations", summary="Evaluations", response_model=EvaluationsView)
def evaluations(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    benchmark: Annotated[Annotated[Text, StringConstraints(max_length=200)] | None, Query()] = None,
    after: Annotated[int | None, Query(ge=-1, le=MAX_STEP, description="Only later steps.")] = None,
    per_problem: Annotated[bool, Query(description="Include the scores of each problem.")] = True,
) -> Response:
    """Evaluations of the effective history, one record per step and benchmark."""
    found = repository.evaluations(session, run_number(session, run_id), benchmark=benchmark, after=after)
    if not per_problem:
        found = [{name: value for name, value in record.items() if name != "per_problem"} for record in found]
    return plain_answer({"items": found})


def _position(cursor: str) -> tuple[int, int]:
    """Step and number in a cursor; raises Invalid for any other text."""
    found = _CURSOR.fullmatch(cursor)
    step, number = (int(part) for part in found.groups()) if found else (MAX_STEP + 1, 0)
    if step > MAX_STEP:
        raise Invalid.of("cursor", "is not a cursor; pass next_cursor of an earlier response unchanged")
    return step, number


def _view(row: Sample) -> SampleView:
    values: dict[str, Any] = {name: getattr(row, name) for name in SampleView.model_fields if hasattr(row, name)}
    return SampleView(**values, group=row.group_index, sample=row.sample_index)
