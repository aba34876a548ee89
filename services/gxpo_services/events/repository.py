"""The audit trail: every state change and every action of a user or scheduler, with its actor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import event, func, insert, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.events import Event
from gxpo_services.db.tables.runs import Run
from gxpo_services.events.schemas import AuditQuery

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
