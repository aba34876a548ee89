"""A scheduler under a test: its clock, how it is made, and what a trainer leaves on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings

PAUSE_S = 60.0
"""Longer than the pauses before a repeated launch in these tests."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def rounds(self, scheduler: Scheduler, seconds: float) -> None:
        """Rounds of a scheduler for so long, at most 10 s apart."""
        steps = math.ceil(seconds / 10.0)
        for _ in range(steps):
            self.passes(seconds / steps)
            scheduler.tick()


Make = Callable[..., Scheduler]


def write_outcome(settings: ServiceSettings, run_id: str, attempt: int, outcome: str, **values: Any) -> None:
    body = {"attempt": attempt, "outcome": outcome, "ended_by": None, "reason": None, "message": "", "time": 1.0}
    (settings.artifacts / run_id / "outcome.json").write_text(json.dumps(body | values))
