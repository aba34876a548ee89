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
