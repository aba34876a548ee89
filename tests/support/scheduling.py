"""A scheduler under a test: its clock, its launcher, its database, and what trainers leave there and on the disk."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.run_states import Action, RunState
from gxpo_services.scheduling.launcher import JobState
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings
from support import queued_runs as runs
from support.scripted_launcher import ScriptedLauncher

PAUSE_S = 60.0
"""Longer than the pauses before a repeated launch in these tests."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Cluster:
    """What schedulers share, and how a test moves it."""

    database: Database
    settings: ServiceSettings
    clock: Clock = field(default_factory=Clock)
    launcher: ScriptedLauncher = field(default_factory=ScriptedLauncher)

    def scheduler(self, owner: str = "first", **changes: Any) -> Scheduler:
        """A scheduler with some settings changed. api_answers: whether trainers can report."""
        answers = changes.pop("api_answers", lambda: True)
        settings = self.settings.model_copy(update=changes)
        return Scheduler(self.database, settings, self.launcher, owner=owner, api_answers=answers, clock=self.clock)

    def rounds(self, scheduler: Scheduler, seconds: float, *, reporting: str | None = None) -> None:
        """Rounds of a scheduler for so long, at most 10 s apart. reporting: run whose trainer reports before each."""
        steps = math.ceil(seconds / 10.0)
        for _ in range(steps):
            self.clock.passes(seconds / steps)
            if reporting is not None:
                self.report(reporting)
            scheduler.tick()

    def running(self, scheduler: Scheduler, **values: Any) -> str:
        """A run whose trainer has reported once."""
        run_id = self.add_run(**values)
        scheduler.tick()
        self.report(run_id)
        return run_id

    def supervising(self, **changes: Any) -> tuple[Scheduler, str]:
        """A scheduler and its only run."""
        scheduler = self.scheduler(**changes)
        return scheduler, self.running(scheduler)

    def ends(self, scheduler: Scheduler, job_id: str, state: JobState, message: str = "") -> None:
        """A job ends, and the next round sees it."""
        self.launcher.ends(job_id, state, message)
        scheduler.tick()

    def add_run(self, **values: Any) -> str:
        return runs.add_run(self.database, **values)

    def get(self, run_id: str) -> Run:
        return runs.get(self.database, run_id)

    def row(self, run_id: str) -> dict[str, Any]:
        return runs.row(self.database, run_id)

    def change(self, run_id: str, **values: Any) -> None:
        runs.change(self.database, run_id, **values)

    def move(self, run_id: str, new: RunState) -> None:
        runs.move(self.database, run_id, new)

    def request(self, run_id: str, action: Action) -> None:
        runs.request(self.database, run_id, action, at=self.clock.now)

    def report(self, run_id: str) -> None:
        runs.report(self.database, run_id, at=self.clock.now)

    def messages(self, run_id: str) -> list[tuple[str, str]]:
        return runs.messages(self.database, run_id)


def write_outcome(settings: ServiceSettings, run_id: str, attempt: int, outcome: str, **values: Any) -> None:
    body = {"attempt": attempt, "outcome": outcome, "ended_by": None, "reason": None, "message": "", "time": 1.0}
    (settings.artifacts / run_id / "outcome.json").write_text(json.dumps(body | values))
