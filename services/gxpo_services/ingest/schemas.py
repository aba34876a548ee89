"""Requests and answers of trainers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.ingest.batches import LONGEST_PHASE, MOST_ROWS


class Offsets(BaseModel):
    """Whole lines of each file."""

    metrics: int = Field(0, ge=0, le=2**31 - 1, examples=[120])
    samples: int = Field(0, ge=0, le=2**31 - 1, examples=[960])
    evaluations: int = Field(0, ge=0, le=2**31 - 1, examples=[3])
    events: int = Field(0, ge=0, le=2**31 - 1, examples=[7])


_Rows = Annotated[list[dict[str, Any] | None], Field(max_length=MOST_ROWS)]


class IngestRequest(BaseModel):
    """A trainer's report: rows of its files, or a heartbeat. For documentation; batches.py validates."""

    model_config = ConfigDict(extra="allow")

    attempt: int = Field(ge=1, le=2**31 - 1, description="Number of the launch.", examples=[1])
    batch: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="1, 2, 3, … in this launch; null for a heartbeat without rows.",
        examples=[4],
    )
    phase: str | None = Field(
        None, max_length=LONGEST_PHASE, description="What the trainer is doing.", examples=["waiting for 3 GPUs"]
    )
    offsets: Offsets = Field(default_factory=Offsets, description="Lines of each file before this batch's rows.")
    metrics: _Rows = Field([], description="Lines of metrics.jsonl; null: a line left out.")
    samples: _Rows = Field([], description="Lines of samples.jsonl.")
    evaluations: _Rows = Field([], description="Lines of evaluations.jsonl.")
    events: _Rows = Field([], description="Lines of events.jsonl.")
    identity: dict[str, Any] | None = Field(None, description="run.json, once a launch and when it changed.")
    outcome: dict[str, Any] | None = Field(None, description="outcome.json, with the last batch of a launch.")


class IngestView(BaseModel):
    """Result of a report."""

    applied: bool = Field(description="False for a heartbeat and for a repeated batch.")
    offsets: Offsets = Field(description="Lines that the service has now.")
    wish: Literal["pause", "cancel"] | None = Field(
        description="Pause or cancel request, to be carried out at the end of the step."
    )
