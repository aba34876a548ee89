"""`/runs/{run_id}/logs`: what a run's job printed, in parts and as a stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import DatabaseDep, ServiceRoute, Settings
from gxpo_services.api.errors import responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.api.fields import MAX_INTEGER
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.logs import log_file, service
from gxpo_services.logs.schemas import LogView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

Offset = Annotated[int, Query(ge=-MAX_INTEGER, le=MAX_INTEGER, description="Byte to begin at; negative: from the end.")]


@router.get("/logs", summary="A part of the log")
def logs(
    run_id: ExistingRun,
    settings: Settings,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=log_file.LARGEST_PIECE, description="Most bytes.")] = 65_536,
) -> LogView:
    """What the run's job printed. A job that has not begun to print has an empty log."""
    return service.read_log(settings, run_id, offset, limit)


@router.get(
    "/logs/stream",
    summary="The log as it grows",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_log(
    run_id: ExistingRun,
    settings: Settings,
    database: DatabaseDep,
    offset: Offset = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER, description="Go on from there.")] = None,
) -> StreamingResponse:
    """Server-Sent Events: `log` with {text, offset, next_offset}, `truncated` when the log was begun anew, and `end`
    when the run has ended and all of its log is sent."""
    begin = last_event_id if last_event_id is not None else offset
    run = RunFiles(settings.artifacts, run_id)
    stream = log_file.follow(run, lambda: service.is_over(database, run_id), begin)
    return StreamingResponse(stream, media_type="text/event-stream")
