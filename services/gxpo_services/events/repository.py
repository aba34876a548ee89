"""The audit trail: every change of state and every deed of a person or the scheduler, with its actor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.events import Event


def record(session: Session, run_number: int | None, actor: str, kind: str, message: str, **fields: Any) -> None:
    """Add one event in the caller's transaction: it is there exactly when the change is."""
    session.add(Event(run_number=run_number, time=time.time(), actor=actor, kind=kind, message=message, fields=fields))


def add_reported(session: Session, run_number: int, rows: Sequence[dict[str, Any]], *, actor: str) -> None:
    """Events with a time of their own. Insert them under the run's lock, so that their numbers are in order."""
    if rows:
        session.execute(insert(Event.__table__), [{"run_number": run_number, "actor": actor, **row} for row in rows])  # type: ignore[arg-type]


def list_events(session: Session, run_number: int, *, after: int, limit: int) -> list[Event]:
    query = select(Event).where(Event.run_number == run_number, Event.number > after)
    return list(session.scalars(query.order_by(Event.number).limit(limit)))
