"""`/runs/{run_id}/samples` and `/runs/{run_id}/evaluations`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import MAX_STEP, RunId, Text
from gxpo_services.samples import service
from gxpo_services.samples.schemas import EvaluationsView, SamplePage

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

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
    return service.samples(session, run_id, step=step, verdict=verdict, limit=limit, cursor=cursor)


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
    return service.evaluations(session, run_id, benchmark=benchmark, after=after, per_problem=per_problem)
