"""The last lines of a run's timeline.jsonl."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import ValidationError

from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.timeline.schemas import StepTimeline

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
    found = [step for line in lines if (step := _step(line)) is not None]
    return found[-count:]


def _step(line: bytes) -> StepTimeline | None:
    try:
        row: dict[str, Any] = json.loads(line)
        spans = [dict(zip(("process", "activity", "begin", "end"), span, strict=True)) for span in row["spans"]]
        return StepTimeline.model_validate({**row, "spans": spans})
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError):
        return None
