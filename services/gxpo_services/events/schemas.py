"""Answers about events. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gxpo_services.api.fields import Id, Text


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
