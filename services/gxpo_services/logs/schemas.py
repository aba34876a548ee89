"""Answers about logs."""

from __future__ import annotations

from pydantic import BaseModel, Field


class LogView(BaseModel):
    """A section of the log. Offsets and sizes are in bytes."""

    text: str = Field(description="The text; invalid UTF-8 is replaced by U+FFFD.")
    offset: int = Field(description="Offset of the text.")
    next_offset: int = Field(description="Offset of the next read.")
    size: int = Field(description="Current size of the log.")
