"""Answers about events. Times are seconds since 1970.

The audit trail: every state change and every action of a user or scheduler, with its actor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field
from sqlalchemy import event, func, insert, select
from sqlalchemy.orm import Session

from gxpo_services.api.fields import Id, Text
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


class AuditPage(BaseModel):
    """A page of the audit trail, newest first."""

    items: list[AuditEntry]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")


class AuditQuery(BaseModel):
    """Filters and page of the audit trail."""

    actor: Text | None = Field(None, max_length=120, description="Exact.", examples=["token:ada"])
    kind: Text | None = Field(None, max_length=60, description="Exact.", examples=["token_created"])
    run: Id | None = Field(None, description="Id of a run.")
    after: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")
    before: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")
    limit: int = Field(50, ge=1, le=200, description="Page size.")
    cursor: Text | None = Field(None, max_length=2000, description="`next_cursor` of the previous page.")


class EventPage(BaseModel):
    """Events in the requested order."""

    items: list[EventView]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")
    next_after: int = Field(description="Pass it as `after` to get the events that follow later.")


TRAINER = "trainer"
"""Actor of events that a trainer reports."""
_LOCK = 0x67786576  # "gxev"
_PENDING = "gxpo_events"
"""Key in Session.info: rows to insert at the commit."""


def record(session: Session, run_number: int | None, actor: str, kind: str, message: str, **fields: Any) -> None:
    """Add an event in the caller's transaction, so that it is stored if and only if the change is.

    On PostgreSQL it is inserted at the commit; queries of this transaction do not find it.
    """
    row = {"run_number": run_number, "time": time.time(), "actor": actor, "kind": kind, "message": message}
    _add(session, [row | {"fields": fields}])


def add_reported(session: Session, run_number: int, rows: Sequence[dict[str, Any]], *, actor: str) -> None:
    """Add events reported by a trainer, as `record` does."""
    if rows:
        _add(session, [{"run_number": run_number, "actor": actor, **row} for row in rows])


def _add(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert events so that their numbers become visible in ascending order: readers continue after the last number.

    SQLite has one writer at a time. On PostgreSQL numbers are drawn under a lock that is held until the commit. It is
    taken last, because a transaction that waits for the row of a run while it holds the lock could be a deadlock.
    """
    if session.get_bind().dialect.name == "sqlite":
        _insert(session, rows)
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
    _insert(session, rows)


def _insert(session: Session, rows: list[dict[str, Any]]) -> None:
    session.execute(insert(Event.__table__), rows)  # type: ignore[arg-type]


def list_events(
    session: Session, run_number: int, *, after: int, before: int | None = None, newest_first: bool = False, limit: int
) -> list[Event]:
    """Events of a run with a larger number than `after` and a smaller one than `before`."""
    query = select(Event).where(Event.run_number == run_number, Event.number > after)
    if before is not None:
        query = query.where(Event.number < before)
    return list(session.scalars(query.order_by(Event.number.desc() if newest_first else Event.number).limit(limit)))


def audit(session: Session, query: AuditQuery, before: int | None, limit: int) -> list[tuple[Event, str | None]]:
    """Events of all runs and of the service with the id of their run, newest first, without those of trainers.

    before: only events with a smaller number.
    """
    found = select(Event, Run.id).outerjoin(Run, Run.number == Event.run_number).where(Event.actor != TRAINER)
    equal = {Event.actor: query.actor, Event.kind: query.kind, Run.id: query.run}
    found = found.where(*(column == value for column, value in equal.items() if value is not None))
    if query.after is not None:
        found = found.where(Event.time > query.after)
    if query.before is not None:
        found = found.where(Event.time < query.before)
    if before is not None:
        found = found.where(Event.number < before)
    return [(event, run) for event, run in session.execute(found.order_by(Event.number.desc()).limit(limit))]
