"""Answers about events. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class EventView(BaseModel):
    """An event of a run with its actor."""

    number: int
    time: float
    actor: str = Field(examples=["token:ada", "scheduler:host-1", "trainer"])
    kind: str = Field(examples=["state"])
    message: str
    fields: dict[str, Any]


class EventPage(BaseModel):
    """Events in order."""

    items: list[EventView]
    next_after: int = Field(description="Pass it as `after` to get the next events.")
