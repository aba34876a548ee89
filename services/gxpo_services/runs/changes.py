"""`/events/stream`: changes of runs and their events, pushed as Server-Sent Events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.api import streams
from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, Slots, SlottedResponse, Viewer
from gxpo_services.api.errors import NotFound, responses
from gxpo_services.api.fields import MAX_INTEGER, Id
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event, Run
from gxpo_services.outputs.events import EventView
from gxpo_services.run_states import TERMINAL
from gxpo_services.runs import service
from gxpo_services.runs.schemas import SILENCE_S, silent_s

_EVENTS_AT_ONCE = 500
_RUNS_AT_ONCE = 200
"""Runs that are read in full at a time, as in the largest page of a list."""
_columns = Run.__table__.c
_COLUMNS = (
    *(_columns.number, _columns.id),
    *(_columns.state, _columns.updated_at, _columns.launch, _columns.phase, _columns.recoveries),
    *(_columns.step, _columns.attempt, _columns.backward_passes, _columns.score_step, _columns.heartbeat_at),
)
"""Number, id, columns of which one changes with everything that a reader of a run wants to know, and the heartbeat."""


@dataclass(slots=True)
class Changes:
    """What a reader has seen. numbers: the runs to follow; None: every run that has not ended.

    after: number of the last event that was sent. ids_only: a run that changed is told by its id alone, for readers who
    ask for what they need of it.
    """

    numbers: list[int] | None
    after: int
    ids_only: bool = False
    _seen: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _ids: dict[int, str] = field(default_factory=dict)
    is_over: bool = False
    """Whether all runs to follow have ended."""

    unsent: list[int] = field(default_factory=list)
    """Runs that changed and have not been sent: the next call of `read` returns more of them."""

    def read(self, session: Session) -> list[bytes]:
        """What has changed since the last call: deleted runs, a page of runs, and events after the last page."""
        messages = [] if self.unsent else self._compare(session)
        page, self.unsent = self.unsent[:_RUNS_AT_ONCE], self.unsent[_RUNS_AT_ONCE:]
        messages += [streams.event("run", view) for view in self._views(session, page)]
        if self.unsent:
            return messages
        events = self._events(session)
        if len(events) < _EVENTS_AT_ONCE:
            self._end()
        return messages + events

    def _compare(self, session: Session) -> list[bytes]:
        """Note which runs changed; the messages for those that were deleted."""
        if self.numbers is not None:
            rows = list(session.execute(select(*_COLUMNS).where(_columns.number.in_(self.numbers))))
        else:
            rows = list(session.execute(select(*_COLUMNS).where(_columns.state.not_in(sorted(TERMINAL)))))
            ended = sorted(self._seen.keys() - {row[0] for row in rows})  # since the last call
            for begin in range(0, len(ended), _RUNS_AT_ONCE):
                part = ended[begin : begin + _RUNS_AT_ONCE]
                rows += session.execute(select(*_COLUMNS).where(_columns.number.in_(part)))
        now = time.time()
        silences = {row.number: silent_s(row.state, row.heartbeat_at, now) or 0.0 for row in rows}
        # A silence is told when it becomes one, and at each further multiple.
        marks = {row.number: (*row[2:-1], silences[row.number] // SILENCE_S) for row in rows}
        self.unsent = sorted(number for number, mark in marks.items() if self._seen.get(number) != mark)
        deleted = [{"id": self._ids[number]} for number in sorted(self._seen.keys() - marks.keys())]
        self._ids = {row[0]: row[1] for row in rows}
        self._seen = marks
        return [streams.event("deleted", gone) for gone in deleted]

    def _end(self) -> None:
        """Stop following runs that ended and were sent, or note that all of the requested ones did."""
        followed = {number: mark for number, mark in self._seen.items() if mark[0] not in TERMINAL}
        if self.numbers is not None:
            self.is_over = not followed
            return
        self._seen = followed
        self._ids = {number: self._ids[number] for number in followed}

    def _views(self, session: Session, changed: list[int]) -> list[dict[str, Any]]:
        if self.ids_only:
            return [{"id": self._ids[number]} for number in changed]
        return [view.model_dump(mode="json") for view in service.views(session, changed)]

    def _events(self, session: Session) -> list[bytes]:
        if last_event(session) <= self.after:  # spares the search among thousands of runs
            return []
        query = select(Event).where(Event.run_number.in_(list(self._ids)), Event.number > self.after)
        messages = []
        for event in session.scalars(query.order_by(Event.number).limit(_EVENTS_AT_ONCE)):
            view = EventView.model_validate(event, from_attributes=True).model_dump(mode="json")
            messages.append(streams.event("event", view | {"run": self._ids[event.run_number or 0]}, event.number))
            self.after = event.number
        return messages


def last_event(session: Session) -> int:
    return session.scalar(select(func.max(Event.number))) or 0


async def follow(
    database: Database,
    changes: Changes,
    may_read: Callable[[], bool],
    *,
    pause_s: float = 0.5,
    comment_s: float = 2.0,
) -> AsyncIterator[bytes]:
    """Server-Sent Events until all runs have ended.

        run      data: the run as in lists, or its id alone; first of every run, then of each that changed
        event    data: an event with the id of its `run`, id: its number
        deleted  data: {"id"}
        end      all runs have ended
        revoked  the reader's token is no longer valid

    A comment every `comment_s` seconds without changes. may_read: asked before each read, in a thread like the reads.
    """

    def read() -> list[bytes] | None:
        if not may_read():
            return None
        with database.reading() as session:
            return changes.read(session)

    yield b": runs\n\n"
    quiet_s = 0.0
    while True:
        messages = await run_sync(read)
        if messages is None:
            yield streams.event("revoked", {"after": changes.after})
            return
        if messages:
            yield b"".join(messages)
            quiet_s = 0.0
        if changes.is_over:
            yield streams.event("end", {"after": changes.after})
            return
        if changes.unsent:
            continue
        await anyio.sleep(pause_s)
        quiet_s += pause_s
        if quiet_s >= comment_s:
            yield streams.COMMENT
            quiet_s = 0.0


router = APIRouter(route_class=ServiceRoute, tags=["runs"], responses=responses(401, 404, 422, 503))


@router.get(
    "/events/stream",
    summary="Stream changes of runs",
    response_class=StreamingResponse,
    responses={200: streams.CONTENT, **responses(429)},
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
    changes = await run_in_threadpool(_begin, database, runs, begin, ids_only)
    stream = follow(database, changes, lambda: streams.is_valid(database, token))
    slots: Slots = request.app.state.stream_slots
    return SlottedResponse(slots, principal.token_id, stream, media_type=streams.MEDIA_TYPE)


def _begin(database: Database, runs: list[str], after: int | None, ids_only: bool) -> Changes:
    """Raises NotFound."""
    with database.reading() as session:
        numbers: dict[str, int] = dict(session.execute(select(Run.id, Run.number).where(Run.id.in_(runs))).all())
        missing = [run_id for run_id in runs if run_id not in numbers]
        if missing:
            raise NotFound(f"there is no run {missing[0]}")
        after = last_event(session) if after is None else after
    return Changes(sorted(numbers.values()) if runs else None, after, ids_only)
