"""A launcher whose jobs follow the test's script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from gxpo_services.scheduling.launcher import Job, JobRefused, JobState, JobStatus, LauncherUnavailable


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
