"""Events of a run."""

from __future__ import annotations

from sqlalchemy.orm import Session

from gxpo_services.api.existing_run import run_number
from gxpo_services.events import repository
from gxpo_services.events.schemas import EventPage, EventView


def events(session: Session, run_id: str, *, after: int, limit: int) -> EventPage:
    """Raises NotFound."""
    rows = repository.list_events(session, run_number(session, run_id), after=after, limit=limit)
    items = [EventView.model_validate(row, from_attributes=True) for row in rows]
    return EventPage(items=items, next_after=items[-1].number if items else after)
