"""`/runs/{run_id}/logs`: read and stream the log of a run's jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from gxpo_services.api import sse
from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, Settings, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.api.fields import MAX_INTEGER
from gxpo_services.api.slots import SlottedResponse, slots_of
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.db.database import Database
from gxpo_services.db.run_lookup import find_run
from gxpo_services.logs import log_file
from gxpo_services.logs.schemas import LogView
from gxpo_services.run_states import TERMINAL

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

Offset = Annotated[int, Query(ge=-MAX_INTEGER, le=MAX_INTEGER, description="First byte; negative: from the end.")]


@router.get("/logs", summary="Read the log")
def logs(
    run_id: ExistingRun,
    settings: Settings,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=log_file.LARGEST_PIECE, description="Maximum number of bytes.")] = 65_536,
) -> LogView:
    """Output of the run's jobs, from a byte offset."""
    piece = log_file.read_log(RunFiles(settings.artifacts, run_id), offset, limit)
    return LogView.model_validate(piece, from_attributes=True)


@router.get(
    "/logs/stream",
    summary="Stream the log",
    response_class=StreamingResponse,
    responses={200: sse.CONTENT, **responses(429)},
)
async def stream_log(
    request: Request,
    principal: Viewer,
    run_id: ExistingRun,
    settings: Settings,
    database: DatabaseDep,
    token: BearerToken,
    offset: Offset = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER, description="Offset to resume from.")] = None,
) -> StreamingResponse:
    """Server-Sent Events: `log` with {text, offset, next_offset}, `truncated` when the log was restarted, `end` when
    the run has ended and its whole log has been sent, `revoked` when the token has become invalid."""
    begin = last_event_id if last_event_id is not None else offset
    run = RunFiles(settings.artifacts, run_id)
    stream = log_file.follow(run, lambda: _is_over(database, run_id), lambda: sse.is_valid(database, token), begin)
    slots = slots_of(request, "stream_slots")
    return SlottedResponse(slots, principal.token_id, stream, media_type=sse.MEDIA_TYPE)


def _is_over(database: Database, run_id: str) -> bool:
    """Whether a run has ended or was deleted."""
    with database.reading() as session:
        found = find_run(session, run_id)
    return found is None or found[1] in TERMINAL
