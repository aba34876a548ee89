"""Answers about timelines. Times are seconds."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SpanView(BaseModel):
    """One activity of one process."""

    process: str = Field(examples=["engine 0", "learner", "verifier"])
    activity: str = Field(examples=["sampling", "verifying", "updating", "syncing", "saving"])
    begin: float = Field(description="Seconds since the begin of the step.")
    end: float


class StepTimeline(BaseModel):
    """What the run's processes did in a step. A process is idle where it has no span."""

    attempt: int
    step: int
    begin: float = Field(description="Seconds since 1970.")
    spans: list[SpanView]


class TimelineView(BaseModel):
    """The last steps, in order."""

    items: list[StepTimeline]
