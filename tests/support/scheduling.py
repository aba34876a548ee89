"""A scheduler under a test: its clock, its launcher, its database, and what trainers leave there and on the disk."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.run_states import Action, RunState
from gxpo_services.scheduling.launcher import Job, JobRefused, JobState, JobStatus, LauncherUnavailable
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings
from support import queued_runs as runs

PAUSE_S = 60.0
"""Longer than the pauses before a repeated launch in these tests."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Crash(BaseException):
    """The scheduler's process dies here: nothing of it may catch this."""


class ScriptedLauncher:
    """jobs: state of each job that was submitted. before, after: called with a verb and a job id around each call;
    what they raise gets out. Used by several threads."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.submitted: list[Job] = []
        self.calls: list[tuple[str, str]] = []
        self.away = False
        self.refusal = ""
        """Why no job is taken; empty: jobs are."""
        self.capacity = (1000.0, 1000.0)
        self.before: Callable[[str, str], None] = lambda verb, job_id: None
        self.after: Callable[[str, str], None] = lambda verb, job_id: None
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        self._begin("submit", job.id)
        if self.refusal:
            raise JobRefused(self.refusal)
        with self._lock:
            if job.id not in self.jobs:
                self.jobs[job.id] = JobStatus("running")
                self.submitted.append(job)
        self.after("submit", job.id)

    def status(self, job_id: str) -> JobStatus:
        self._begin("status", job_id)
        status = self.jobs.get(job_id, JobStatus("unknown"))
        self.after("status", job_id)
        return status

    def stop(self, job_id: str) -> None:
        self._begin("stop", job_id)
        self.after("stop", job_id)

    def delete(self, job_id: str) -> None:
        self._begin("delete", job_id)
        self.jobs.pop(job_id)

    def statuses(self, artifacts: Path) -> dict[str, JobStatus]:
        self._begin("statuses", "")
        known = dict(self.jobs)
        self.after("statuses", "")
        return known

    def resources(self) -> tuple[float, float]:
        self._begin("resources", "")
        return self.capacity

    def ends(self, job_id: str, state: JobState, message: str = "") -> None:
        self.jobs[job_id] = JobStatus(state, message)

    def stopped(self) -> list[str]:
        return [job_id for verb, job_id in self.calls if verb == "stop"]

    def _begin(self, verb: str, job_id: str) -> None:
        with self._lock:
            self.calls.append((verb, job_id))
        self.before(verb, job_id)
        if self.away:
            raise LauncherUnavailable("nobody answers")


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
