"""`/runs/{run_id}/timeline`: what each process did in the last steps, from the end of its timeline.jsonl."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field, FiniteFloat

from gxpo_services.api.dependencies import ExistingRun, Settings, run_router
from gxpo_services.api.fields import read_json
from gxpo_services.outputs.files import RunFiles


class SpanView(BaseModel):
    """One activity of one process."""

    process: str = Field(examples=["engine 0", "learner", "verifier"])
    activity: str = Field(examples=["sampling", "verifying", "updating", "syncing", "saving", "evaluating"])
    begin: FiniteFloat = Field(description="Seconds since the begin of the step.")
    end: FiniteFloat


class StepTimeline(BaseModel):
    """What the run's processes did in a step, or in the evaluation after it. A process is idle where it has no span."""

    attempt: int
    step: int
    begin: FiniteFloat = Field(description="Seconds since 1970.")
    spans: list[SpanView]


class TimelineView(BaseModel):
    """The last steps, in order."""

    items: list[StepTimeline]


TIMELINE = "timeline.jsonl"
LARGEST_TAIL = 1 << 20
"""Bytes read from the end of the file; steps beyond are left out."""


def last_steps(run: RunFiles, count: int) -> list[StepTimeline]:
    """At most `count` steps; none without a file. Lines that are no timelines are left out: a trainer writes them."""
    try:
        file = run.open(TIMELINE)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - LARGEST_TAIL)
        lines = os.pread(file.fileno(), LARGEST_TAIL, begin).split(b"\n")
    if begin:
        del lines[0]  # it may begin in the middle of a line
    steps = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):  # among them pydantic's ValidationError
            row: dict[str, Any] = read_json(line)
            spans = [dict(zip(SpanView.model_fields, span, strict=True)) for span in row["spans"]]
            steps.append(StepTimeline.model_validate({**row, "spans": spans}))
    return steps[-count:]


router = run_router()


@router.get("/timeline", summary="Timeline of the last steps")
def timeline(
    run_id: ExistingRun,
    settings: Settings,
    steps: Annotated[int, Query(ge=1, le=50, description="Maximum number of steps.")] = 4,
) -> TimelineView:
    """Sampling, verifying, updating and syncing of engines, verifier and learner, as the trainer recorded them."""
    return TimelineView(items=last_steps(RunFiles(settings.artifacts, run_id), steps))
