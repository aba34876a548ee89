"""`/runs/{run_id}/events`: the audit trail of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.existing_run import run_number
from gxpo_services.api.fields import MAX_INTEGER, RunId
from gxpo_services.events import repository
from gxpo_services.events.schemas import EventPage, EventView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)


@router.get("/events", summary="Events of a run")
def events(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Number of the last event received.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage:
    """State changes, actions of users and schedulers, and events reported by the trainer, in order."""
    rows = repository.list_events(session, run_number(session, run_id), after=after, limit=limit)
    items = [EventView.model_validate(row, from_attributes=True) for row in rows]
    return EventPage(items=items, next_after=items[-1].number if items else after)
