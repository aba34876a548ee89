"""Answers about checkpoints. Times are seconds since 1970."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gxpo_services.api.fields import JsonNumber


class CheckpointView(BaseModel):
    """A complete checkpoint."""

    step: int
    score: JsonNumber | None = Field(description="eval/average/pass@1 at that step, null without an evaluation.")
    size_bytes: int
    created_at: float
    best: bool = Field(description="Whether it has the best score; the earliest of equals.")
    newest: bool


class CheckpointsView(BaseModel):
    """Checkpoints on disk in order of steps."""

    items: list[CheckpointView]
