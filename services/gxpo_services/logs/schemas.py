"""Answers about logs."""

from __future__ import annotations

from pydantic import BaseModel, Field


class LogView(BaseModel):
    """A part of the log. Offsets and sizes are bytes."""

    text: str = Field(description="What the job printed; bytes that are no UTF-8 are shown as U+FFFD.")
    offset: int = Field(description="Where the text begins.")
    next_offset: int = Field(description="Where to read on.")
    size: int = Field(description="Size of the log now.")
