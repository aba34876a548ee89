"""`/runs/{run_id}/samples` and `/runs/{run_id}/evaluations`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import Invalid, responses
from gxpo_services.api.existing_run import run_number
from gxpo_services.api.fields import MAX_STEP, RunId, Text
from gxpo_services.db.tables.samples import Sample
from gxpo_services.samples import repository
from gxpo_services.samples.schemas import EvaluationsView, SamplePage, SampleView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

_CURSOR = re.compile(r"[0-9]{1,18}")
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
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[Annotated[Text, StringConstraints(max_length=40)] | None, Query()] = None,
) -> SamplePage:
    """Training samples of the effective history, paged."""
    number = run_number(session, run_id)
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        raise Invalid.of("cursor", "is not a cursor; pass next_cursor of an earlier response unchanged")
    rows = repository.samples(session, number, step=step, verdict=verdict, after=int(cursor or 0), limit=limit + 1)
    return SamplePage(
        items=[_view(row) for row in rows[:limit]],
        next_cursor=str(rows[limit - 1].number) if len(rows) > limit else None,
        steps=repository.sample_steps(session, number),
    )


@router.get("/evaluations", summary="Evaluations")
def evaluations(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    benchmark: Annotated[Annotated[Text, StringConstraints(max_length=200)] | None, Query()] = None,
    after: Annotated[int | None, Query(ge=-1, le=MAX_STEP, description="Only later steps.")] = None,
    per_problem: Annotated[bool, Query(description="Include the scores of each problem.")] = True,
) -> EvaluationsView:
    """Evaluations of the effective history, one record per step and benchmark."""
    found = repository.evaluations(session, run_number(session, run_id), benchmark=benchmark, after=after)
    if not per_problem:
        found = [{name: value for name, value in record.items() if name != "per_problem"} for record in found]
    return EvaluationsView(items=found)


def _view(row: Sample) -> SampleView:
    values: dict[str, Any] = {name: getattr(row, name) for name in SampleView.model_fields if hasattr(row, name)}
    return SampleView(**values, group=row.group_index, sample=row.sample_index)
