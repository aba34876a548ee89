"""`/events/stream`: changes of runs and their events, pushed as Server-Sent Events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, Viewer, held_slot, run_numbers
from gxpo_services.api.errors import responses
from gxpo_services.api.feed import COMMENT, CONTENT, MEDIA_TYPE, RUNS_AT_ONCE, ChangeFeed, Subscription, sse
from gxpo_services.api.fields import MAX_INTEGER, Id
from gxpo_services.runs import listing, schemas
from gxpo_services.runs.schemas import RunView


def messages(session: Session, numbers: Sequence[int]) -> dict[int, bytes]:
    """The message of each run as lists have it, by number, without those deleted meanwhile."""
    return {
        row["number"]: sse("run", RunView.model_validate(schemas.with_progress(row)).model_dump(mode="json"))
        for row in listing.list_rows(session, numbers)
    }


async def follow(feed: ChangeFeed, changes: Subscription, *, ids_only: bool) -> AsyncIterator[bytes]:
    """Server-Sent Events until all runs have ended.

        run      data: the run as in lists, or its id alone; first of every run, then of each that changed
        event    data: an event with the id of its `run`, id: its number
        deleted  data: {"id"}
        end      all runs have ended
        revoked  the reader's token is no longer valid

    A comment every two seconds without changes. Without `end` or `revoked` the service could not go on: its
    database is unavailable.
    """
    yield b": runs\n\n"
    while True:
        if not await changes.wait(2.0):
            yield COMMENT
        while changes.end is None and (parts := await _next(feed, changes, ids_only)):
            yield b"".join(parts)
        if changes.end == "revoked" or (changes.end is None and changes.is_over):
            yield sse(changes.end or "end", {"after": changes.after})
        if changes.end is not None or changes.is_over:
            return


async def _next(feed: ChangeFeed, changes: Subscription, ids_only: bool = False) -> list[bytes]:
    """The next messages: deleted runs and a page of runs; events when no run is unsent; none when all is sent."""
    parts = [sse("deleted", {"id": run}) for run in changes.deleted]
    changes.deleted = []
    while changes.changed:
        page = {number: changes.changed.pop(number) for number in list(changes.changed)[:RUNS_AT_ONCE]}
        parts += [sse("run", {"id": run}) for run in page.values()] if ids_only else await feed.run_messages(page)
        if parts:
            return parts
    while not parts and changes.after is not None and changes.after < changes.last_event:
        parts = await feed.event_messages(changes)
    return parts


router = APIRouter(route_class=ServiceRoute, tags=["runs"], responses=responses(401, 404, 422, 503))


@router.get(
    "/events/stream",
    summary="Stream changes of runs",
    response_class=StreamingResponse,
    responses={200: CONTENT, **responses(429)},
)
async def stream_changes(
    request: Request,
    _: Viewer,
    held: Annotated[ExitStack, held_slot("stream_slots")],
    database: DatabaseDep,
    token: BearerToken,
    runs: Annotated[list[Id], Query(max_length=500, description="Ids; default: every run that has not ended.")] = [],  # noqa: B006
    after: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="Last event received; null: none.")] = None,
    ids_only: Annotated[bool, Query(description="Send the id of a run that changed instead of the run.")] = False,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER, description="The same at a reconnect.")] = None,
) -> StreamingResponse:
    """Server-Sent Events: `run` with a run as in lists, first of every run and then of each that changed; `event` with
    an event and its `run`; `deleted` with an id; `end` when all `runs` have ended; `revoked` when the token has become
    invalid."""
    begin = last_event_id if last_event_id is not None else after
    numbers = await run_sync(run_numbers, database, runs) if runs else None
    changes = Subscription(token, numbers, begin)
    feed: ChangeFeed = request.app.state.changes
    held.enter_context(feed.following(changes))
    return StreamingResponse(follow(feed, changes, ids_only=ids_only), media_type=MEDIA_TYPE)
