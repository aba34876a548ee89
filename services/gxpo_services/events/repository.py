"""The audit trail: every state change and every action of a user or scheduler, with its actor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.events import Event
from gxpo_services.db.tables.runs import Run
from gxpo_services.events.schemas import AuditQuery

TRAINER = "trainer"
"""Actor of events that a trainer reports."""


def record(session: Session, run_number: int | None, actor: str, kind: str, message: str, **fields: Any) -> None:
    """Add an event in the caller's transaction, so that it is stored if and only if the change is."""
    session.add(Event(run_number=run_number, time=time.time(), actor=actor, kind=kind, message=message, fields=fields))


def add_reported(session: Session, run_number: int, rows: Sequence[dict[str, Any]], *, actor: str) -> None:
    """Add events reported by a trainer. Call it under the run's lock, so that event numbers are in order."""
    if rows:
        session.execute(insert(Event.__table__), [{"run_number": run_number, "actor": actor, **row} for row in rows])  # type: ignore[arg-type]


def list_events(session: Session, run_number: int, *, after: int, limit: int) -> list[Event]:
    query = select(Event).where(Event.run_number == run_number, Event.number > after)
    return list(session.scalars(query.order_by(Event.number).limit(limit)))


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
