"""`/runs/{run_id}/events`: the audit trail of a run. `/audit`: that of the service."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from gxpo_services.api import fields
from gxpo_services.api.dependencies import Admin, ReadSession, ServiceRoute, Viewer, run_number
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import MAX_INTEGER, RunId, Text
from gxpo_services.outputs import events as trail
from gxpo_services.outputs.events import AuditEntry, AuditPage, AuditQuery, EventPage, EventView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)
audit = APIRouter(route_class=ServiceRoute, tags=["tokens"], responses=responses(401, 403, 422, 503))
_ORDER = "-audit"
_RUN_ORDERS = {"asc": "+events", "desc": "-events"}


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
    newest_first, before = order == "desc", None
    if cursor is not None:
        place = fields.decode(cursor, _RUN_ORDERS[order], "float").number
        after, before = (after, place) if newest_first else (max(after, place), None)
    number = run_number(session, run_id)
    rows = trail.list_events(session, number, after=after, before=before, newest_first=newest_first, limit=limit + 1)
    items = [EventView.model_validate(row, from_attributes=True) for row in rows[:limit]]
    last = fields.Position(None, items[-1].number) if len(rows) > limit else None
    return EventPage(
        items=items,
        next_cursor=fields.encode(_RUN_ORDERS[order], last) if last else None,
        next_after=max((item.number for item in items), default=after),
    )


@audit.get("/audit", summary="The audit trail")
def audit_trail(query: Annotated[AuditQuery, Query()], _: Admin, session: ReadSession) -> AuditPage:
    """Every state change and every action of a user or scheduler with its actor, newest first, for admins.

    Without what trainers report. The events of a deleted run are deleted with it, except the deletion itself.
    """
    before = None if query.cursor is None else fields.decode(query.cursor, _ORDER, "float").number
    rows = trail.audit(session, query, before, query.limit + 1)
    items = [
        AuditEntry(**EventView.model_validate(event, from_attributes=True).model_dump(), run=run)
        for event, run in rows[: query.limit]
    ]
    more = len(rows) > query.limit
    return AuditPage(
        items=items, next_cursor=fields.encode(_ORDER, fields.Position(None, items[-1].number)) if more else None
    )
