"""`/events/stream`: changes of runs, pushed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from gxpo_services.api import sse
from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, Viewer
from gxpo_services.api.errors import NotFound, responses
from gxpo_services.api.fields import MAX_INTEGER, Id
from gxpo_services.api.slots import SlottedResponse, slots_of
from gxpo_services.db.database import Database
from gxpo_services.runs import changes

router = APIRouter(route_class=ServiceRoute, tags=["runs"], responses=responses(401, 404, 422, 503))


@router.get(
    "/events/stream",
    summary="Stream changes of runs",
    response_class=StreamingResponse,
    responses={200: sse.CONTENT, **responses(429)},
)
async def stream_changes(
    request: Request,
    principal: Viewer,
    database: DatabaseDep,
    token: BearerToken,
    runs: Annotated[list[Id], Query(max_length=500, description="Ids; default: every run that has not ended.")] = [],  # noqa: B006
    after: Annotated[
        int | None,
        Query(ge=0, le=MAX_INTEGER, description="Number of the last event received; default: only new ones."),
    ] = None,
    ids_only: Annotated[bool, Query(description="Send the id of a run that changed instead of the run.")] = False,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MAX_INTEGER, description="The same, after a reconnect.")
    ] = None,
) -> StreamingResponse:
    """Server-Sent Events: `run` with a run as in lists, first of every run and then of each that changed; `event` with
    an event and its `run`; `deleted` with an id; `end` when all `runs` have ended; `revoked` when the token has become
    invalid."""
    begin = last_event_id if last_event_id is not None else after
    found = await run_in_threadpool(_begin, database, runs, begin, ids_only)
    stream = changes.follow(database, found, lambda: sse.is_valid(database, token))
    slots = slots_of(request, "stream_slots")
    return SlottedResponse(slots, principal.token_id, stream, media_type=sse.MEDIA_TYPE)


def _begin(database: Database, runs: list[str], after: int | None, ids_only: bool) -> changes.Changes:
    """Raises NotFound."""
    with database.reading() as session:
        numbers = changes.numbers_of(session, runs)
        missing = [run_id for run_id in runs if run_id not in numbers]
        if missing:
            raise NotFound(f"there is no run {missing[0]}")
        after = changes.last_event(session) if after is None else after
    return changes.Changes(sorted(numbers.values()) if runs else None, after, ids_only)
