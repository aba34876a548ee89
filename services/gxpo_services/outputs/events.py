"""The audit trail: every state change and every action of a user or scheduler, with its actor.

`/runs/{run_id}/events` is that of a run, `/audit` that of the service. Times are seconds since 1970."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import event, func, insert, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import Admin, ReadSession, ServiceRoute, Viewer, run_number, run_router
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import MAX_INTEGER, Id, Page, PageQuery, RunId, Text, decode_cursor, encode_cursor
from gxpo_services.db.database import note_change
from gxpo_services.db.tables import Event, Run


class EventView(BaseModel):
    """An event of a run with its actor."""

    number: int
    time: float
    actor: str = Field(examples=["token:ada", "scheduler:host-1", "trainer"])
    kind: str = Field(examples=["state"])
    message: str
    fields: dict[str, Any]


class AuditEntry(EventView):
    """An action of a user, of a scheduler or of the service itself."""

    run: str | None = Field(description="Id of the run; null for tokens, groups and deleted runs.")


class AuditPage(Page[AuditEntry]):
    """A page of the audit trail, newest first."""


class AuditQuery(PageQuery):
    """Filters and page of the audit trail."""

    actor: Text | None = Field(None, max_length=120, description="Exact.", examples=["token:ada"])
    kind: Text | None = Field(None, max_length=60, description="Exact.", examples=["token_created"])
    run: Id | None = Field(None, description="Id of a run.")
    after: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")
    before: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")


class EventPage(Page[EventView]):
    """Events in the requested order."""

    next_after: int = Field(description="Pass it as `after` to get the events that follow later.")


TRAINER = "trainer"
SERVICE = "service"
"""Actor of what the service itself found in a report; a trainer chooses the kinds of its own events."""
_LOCK = 0x67786576  # "gxev"
_PENDING = "gxpo_events"
"""Key in Session.info: rows to insert at the commit."""


def record(session: Session, run_number: int | None, actor: str, kind: str, message: str, **fields: Any) -> None:
    """Add an event in the caller's transaction, so that it is stored if and only if the change is."""
    row = {"time": time.time(), "kind": kind, "message": message, "fields": fields}
    add_events(session, run_number, [row], actor=actor)


def add_events(session: Session, run_number: int | None, rows: Sequence[dict[str, Any]], *, actor: str) -> None:
    """Add events so that their numbers become visible in ascending order: readers continue after the last number.

    SQLite has one writer at a time. On PostgreSQL the rows are inserted at the commit, so queries of this transaction
    do not find them: numbers are drawn under a lock that is held until then. It is taken last, because a transaction
    that waits for the row of a run while it holds the lock could be a deadlock.
    """
    if not rows:
        return
    note_change(session)
    rows = [{"run_number": run_number, "actor": actor, **row} for row in rows]
    if session.get_bind().dialect.name == "sqlite":
        session.execute(insert(Event.__table__), rows)  # type: ignore[arg-type]
        return
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        event.listen(session, "before_commit", _insert_pending, once=True)
    session.info[_PENDING] += rows


def _insert_pending(session: Session) -> None:
    rows = session.info.pop(_PENDING)
    session.flush()
    # The foreign key's lock on the runs, which some callers do not hold.
    runs = select(Run.number).where(Run.number.in_({row["run_number"] for row in rows}))
    session.execute(runs.with_for_update(read=True, key_share=True))
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    session.execute(insert(Event.__table__), rows)  # type: ignore[arg-type]


router = run_router()
audit_router = APIRouter(route_class=ServiceRoute, tags=["tokens"], responses=responses(401, 422, 503))
_AUDIT_ORDER = "-audit"
_ORDERS = {"asc": "+events", "desc": "-events"}


@router.get("/events", summary="Events of a run")
def events(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Number of the last event received.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Page size.")] = 200,
    cursor: Annotated[Text | None, Query(max_length=2000, description="`next_cursor` of the previous page.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "asc",
) -> EventPage:
    """State changes, actions of users and schedulers, and events reported by the trainer."""
    query = select(Event).where(Event.run_number == run_number(session, run_id))
    if cursor is not None:
        _value, number = decode_cursor(cursor, _ORDERS[order], "float")
        if order == "desc":
            query = query.where(Event.number < number)
        else:
            after = max(after, number)
    query = query.where(Event.number > after)
    query = query.order_by(Event.number.desc() if order == "desc" else Event.number).limit(limit + 1)
    rows = session.scalars(query).all()
    items = [EventView.model_validate(row, from_attributes=True) for row in rows[:limit]]
    return EventPage(
        items=items,
        next_cursor=encode_cursor(_ORDERS[order], None, items[-1].number) if len(rows) > limit else None,
        next_after=max((item.number for item in items), default=after),
    )


@audit_router.get("/audit", summary="The audit trail")
def audit_trail(query: Annotated[AuditQuery, Query()], _: Admin, session: ReadSession) -> AuditPage:
    """Every state change and every action of a user or scheduler with its actor, newest first, for admins.

    Without what trainers report. The events of a deleted run are deleted with it, except the deletion itself.
    """
    rows = select(Event, Run.id).outerjoin(Run, Run.number == Event.run_number).where(Event.actor != TRAINER)
    equal = {Event.actor: query.actor, Event.kind: query.kind, Run.id: query.run}
    rows = rows.where(*(column == value for column, value in equal.items() if value is not None))
    if query.after is not None:
        rows = rows.where(Event.time > query.after)
    if query.before is not None:
        rows = rows.where(Event.time < query.before)
    if query.cursor is not None:
        rows = rows.where(Event.number < decode_cursor(query.cursor, _AUDIT_ORDER, "float")[1])
    page = session.execute(rows.order_by(Event.number.desc()).limit(query.limit + 1)).all()
    items = [
        AuditEntry(**EventView.model_validate(event, from_attributes=True).model_dump(), run=run)
        for event, run in page[: query.limit]
    ]
    more = len(page) > query.limit
    return AuditPage(items=items, next_cursor=encode_cursor(_AUDIT_ORDER, None, items[-1].number) if more else None)
