"""`/runs/{run_id}/metrics`, `/metrics`: curves; `/runs/{run_id}/ingest`: where trainers report."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import StringConstraints
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from gxpo_services.deps import BearerToken, DatabaseDep, ReadSession, ServiceRoute, Viewer, WriteSession
from gxpo_services.errors import responses
from gxpo_services.fields import Id, RunId, Text
from gxpo_services.metrics import service
from gxpo_services.metrics.schemas import Axis, IngestRequest, IngestView, ManyMetricsView, MetricsView

router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))

Names = Annotated[
    list[Annotated[Text, StringConstraints(max_length=20_000)]],
    Query(
        min_length=1,
        max_length=500,
        description="Metrics; repeat the parameter or put commas between them.",
        examples=[["reward/mean", "gate/z"]],
    ),
]
AxisQuery = Annotated[
    Axis, Query(description="What x is: steps, or what was spent by then in backward passes, seconds or tokens.")
]
After = Annotated[int | None, Query(ge=-1, le=2**31 - 1, description="Only points of later steps.")]
MaxPoints = Annotated[
    int, Query(ge=4, le=20_000, description="Most points of a curve; each peak and dip stays, as do both ends.")
]

_INGEST = IngestRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_INGEST.pop("$defs")  # they are components: the answer has them too


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        return b""  # nobody waits for the answer


def _run_token(run_id: RunId, token: BearerToken, database: DatabaseDep) -> str:
    """The token, when it is that of the run's present launch: before a body is read or a lock is taken for it."""
    with database.reading() as session:
        service.check_token(session, run_id, token)
    return token


@router.post(
    "/runs/{run_id}/ingest",
    summary="Report to the service (trainers)",
    response_model=IngestView,
    responses=responses(409, 410, 413),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _INGEST}}}},
)
def ingest(
    run_id: RunId,
    token: Annotated[str, Depends(_run_token)],
    body: Annotated[bytes, Depends(_body)],
    session: WriteSession,
) -> Response:
    """Rows of a run's files, applied once each: a batch number that comes again changes nothing, and rows that the
    service has are passed over. Needs the token of the run's present launch; access tokens do not open it.

    409 carries `offsets`, the lines that the service has: send on from there. 401 says that another launch owns the
    run, 410 that the run is over or deleted. 422 names the row that is to blame, and nothing of the batch is applied.
    """
    answer = service.receive(session, run_id, token, service.read_batch(body))
    return JSONResponse({"applied": answer.applied, "offsets": answer.offsets, "wish": answer.wish})


@router.get("/runs/{run_id}/metrics/names", summary="Metrics of a run", responses=responses(404))
def metric_names(run_id: RunId, _: Viewer, session: ReadSession) -> list[str]:
    """Names of the metrics that a run has reported, in order."""
    return service.names(session, run_id)


@router.get("/runs/{run_id}/metrics", summary="Curves of a run", response_model=MetricsView, responses=responses(404))
def run_metrics(
    run_id: RunId,
    names: Names,
    _: Viewer,
    session: ReadSession,
    x: AxisQuery = "step",
    after: After = None,
    max_points: MaxPoints = 1000,
) -> Response:
    """Values over steps or costs, one a step, of the history that counts. For a live picture ask with `after` one
    step before the newest you have, and for everything when `revision` has changed."""
    found = service.curves(session, [run_id], service.split_names(names), x, after=after, max_points=max_points)
    return _json(found[run_id])


@router.get("/metrics", summary="Curves of several runs", response_model=ManyMetricsView, responses=responses(404))
def many_metrics(
    runs: Annotated[list[Id], Query(min_length=1, max_length=200, description="Ids of runs; repeat the parameter.")],
    names: Names,
    _: Viewer,
    session: ReadSession,
    x: AxisQuery = "step",
    after: After = None,
    max_points: MaxPoints = 1000,
) -> Response:
    """The same of several runs in one answer."""
    found = service.curves(session, runs, service.split_names(names), x, after=after, max_points=max_points)
    return _json({"runs": found})


def _json(content: Any) -> Response:
    """Written directly, NaN and the infinities as words: a check of tens of thousands of numbers against the schema
    would cost more than reading them."""
    return Response(to_json(content, inf_nan_mode="strings"), media_type="application/json")
