"""`/runs/{run_id}/ingest`: where trainers report."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, WriteSession
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import RunId
from gxpo_services.ingest import service
from gxpo_services.ingest.schemas import IngestRequest, IngestView

router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))

_INGEST = IngestRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_INGEST.pop("$defs")  # they are components: the answer has them too


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        return b""  # the client is gone


def _run_token(run_id: RunId, token: BearerToken, database: DatabaseDep) -> str:
    """Check the token of the run's current launch, before the body is read and the row is locked."""
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
    """Rows of a run's files, applied exactly once: a repeated batch number changes nothing, and rows that the service
    already has are skipped. Needs the token of the run's current launch; access tokens are not accepted.

    409 contains `offsets`, the lines that the service has: continue from there. 401: another launch owns the run. 410:
    the run is over or deleted. 422 names the invalid row; nothing of the batch is applied.
    """
    answer = service.receive(session, run_id, token, service.read_batch(body))
    return JSONResponse({"applied": answer.applied, "offsets": answer.offsets, "wish": answer.request})
