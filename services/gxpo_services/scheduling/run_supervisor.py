"""Supervision of one executing run: start, watch and stop its job, and record the outcome."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services import logging
from gxpo_services.api.principals import hash_token, new_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run, SchedulerRow
from gxpo_services.ingest.drain import drain, forget_lost_lines
from gxpo_services.outputs import events
from gxpo_services.outputs.logs import LOG
from gxpo_services.run_states import RunState
from gxpo_services.runs import configs, lifecycle
from gxpo_services.scheduling import decisions, leases
from gxpo_services.scheduling.launcher import Job, JobRefused, JobStatus, Launcher, kill_orphaned_trainer, prepare
from gxpo_services.settings import ServiceSettings

_LOG = logging.get_logger(__name__)
_LOST, _FORGOTTEN, _DELAYED = "job_lost", "job_forgotten", "launch_delayed"
API_PROBE_FRACTION = 0.25
"""Fraction of heartbeat_s without a heartbeat after which the API itself is probed."""


@dataclass(slots=True)
class Hold:
    """A run that this scheduler holds. since: start of its observation. secret: of the current launch, if known.

    stopping: id of the job being stopped, with the reason. not_before: time of the next attempt to submit a job.
    refusals: of the current launch's job so far, of which `refusal` is the last: failure reason and message.
    """

    lease_token: int
    since: float
    secret: str | None = field(default=None, repr=False)
    stopping: tuple[str, str] | None = None
    not_before: float = 0.0
    refusals: int = 0
    refusal: tuple[str, str] | None = None


@dataclass(eq=False)
class RunSupervisor:
    """Supervises runs. The database is written first, fenced by the lease token; jobs are started and stopped after.

    A crash in between leaves a run without its job, which the next holder of the lease starts with a new secret.

    max_recoveries bounds the consecutive losses of a job without progress of the run. A job unknown to the launcher
    (Ray was restarted) counts against max_forgotten instead: usually the run did not cause it. Missed heartbeats count
    only while the API was reachable and this scheduler was running.
    """

    database: Database
    settings: ServiceSettings
    launcher: Launcher
    owner: str
    actor: str
    command: Callable[[Path], Sequence[str]]
    api_answers: Callable[[], bool]
    clock: Callable[[], float]
    counters: SchedulerRow
    _api_away_at: float = field(default=0.0, init=False)
    _errors: logging.ErrorLog = field(default_factory=logging.ErrorLog, init=False)

    def due(self, held: Mapping[str, Hold], jobs: Mapping[str, JobStatus]) -> list[str]:
        """The runs of `held` for which something may be to do, by one query. jobs: the latest statuses by id."""
        # Whole rows of a thousand runs take seconds.
        columns = (Run.id, Run.lease_token, Run.job_id, Run.state, Run.launched_at, Run.heartbeat_at, Run.request_at)
        query = select(*columns).where(Run.lease_owner == self.owner, leases.IS_EXECUTING)
        with self.database.reading() as session:
            rows = {row.id: row for row in session.execute(query)}
        now = self.clock()
        due = []
        for run_id, hold in held.items():
            row = rows.get(run_id)
            job = jobs.get(row.job_id) if row is not None and row.lease_token == hold.lease_token else None
            if job is None or self._next_action(row, hold, job, now)[0] != "wait":
                due.append(run_id)
        return due

    def advance(self, run_id: str, hold: Hold, jobs: Mapping[str, JobStatus]) -> bool:
        """Take the next action for a run; False when this scheduler no longer holds it.

        A job that is not among `jobs` may have been submitted since, so its status is asked for. Raises StateChanged
        after a concurrent change, LauncherUnavailable, JobRefused when a job cannot be stopped.
        """
        with self.database.reading() as session:
            run = leases.held(session, run_id, self.owner, hold.lease_token)
        if run is None or run.job_id is None:
            return False
        job = jobs.get(run.job_id) or self.launcher.status(run.job_id)
        now = self.clock()
        action, why = self._next_action(run, hold, job, now)
        if action == "stop" and run.phase:
            why += f"; its last phase was {run.phase}"
        if action == "submit" and now >= hold.not_before:
            try:
                self._submit(run, run.job_id, hold)
            except (OSError, JobRefused) as error:
                self._delay(run, hold, error, now)
        elif action == "stop":
            self._stop(run, run.job_id, hold, why)
        elif action == "finish":
            self._finish(run, hold, job, why)
        return True

    def _next_action(self, run: Any, hold: Hold, job: JobStatus, now: float) -> tuple[decisions.Action, str]:
        def age_s(*times: float | None) -> float:
            """Since the latest of these; one that is a lease ahead is from before the clock was set back."""
            past = [at for at in times if at is not None and at <= now + self.settings.lease_s]
            return now - max([hold.since, *past])

        silence_s = age_s(run.heartbeat_at, run.launched_at, self._api_away_at)
        if (run.heartbeat_at or 0.0) > (self._api_away_at or 0.0):
            self._errors.recovered("API")
        if silence_s > API_PROBE_FRACTION * self.settings.heartbeat_s:
            with self._errors.outages("API", ConnectionError):
                if not self.api_answers():
                    self._api_away_at, silence_s = now, 0.0  # outages of the API do not count
                    raise ConnectionError(f"no answer at {self.settings.api_url}; silence of trainers does not count")
        ages = {"launch_age_s": age_s(run.launched_at), "silence_s": silence_s, "request_age_s": age_s(run.request_at)}
        return decisions.next_action(RunState(run.state), job, self.settings, **ages)

    @contextmanager
    def _writing(self, run: Run, hold: Hold) -> Iterator[tuple[Session, Run]]:
        """A transaction, and the current row of the run. Raises StateChanged when this scheduler no longer holds it."""
        with self.database.writing() as session:
            current = leases.held(session, run.id, self.owner, hold.lease_token)
            if current is None:
                raise lifecycle.StateChanged(f"run {run.id} was taken over or ended")
            yield session, current

    def _submit(self, run: Run, job_id: str, hold: Hold) -> None:
        folder, settings = self.settings.artifacts / run.id, self.settings
        refused = configs.refusals(run.config, settings)
        if refused:  # a symbolic link or the server's settings may have changed since
            reasons = "; ".join(f"{path}: {why}" for path, why in refused)
            self._fail(run, hold, f"the server no longer allows it: {reasons}")
            return
        before = f"{run.id}-{run.launch - 1}"
        if self.launcher.status(before).is_alive:  # e.g. paused and resumed while it is ending
            self.launcher.stop(before)
            return
        if kill_orphaned_trainer(folder):
            return
        if hold.secret is None:
            secret = new_token("run")  # the old one was lost with another scheduler
            with self._writing(run, hold) as (session, current):
                if current.state != run.state:
                    return
                lifecycle.change(session, current, hold.lease_token, run_token_sha256=hash_token(secret))
            hold.secret = secret
        forget_lost_lines(self.database, run.id, folder, run.launch, hold.lease_token)
        try:
            prepare(folder, run, url=settings.api_url, token=hold.secret)
        except ValidationError as error:
            self._fail(run, hold, f"this version does not support the run's config: {error}")
            return
        env = {
            **settings.allowlists,
            "GXPO_REWARD_URLS": ",".join(settings.allowed_reward_urls),
            "GXPO_ENVIRONMENT_URLS": ",".join(settings.allowed_environment_urls),
            # The trainer's own limit, and Ray's from SIGTERM to SIGKILL, by default 3 s.
            "GXPO_STOP_WAIT_S": str(settings.stop_wait_s),
            "RAY_JOB_STOP_WAIT_TIME_S": str(settings.stop_wait_s),
        }
        self.launcher.submit(Job(job_id, tuple(self.command(folder)), folder / LOG, env, owner=run.created_by))
        self.counters.launches += 1
        hold.refusals, hold.refusal = 0, None
        _LOG.info("job submitted", run=run.id, job=job_id)

    def _fail(self, run: Run, hold: Hold, detail: str) -> None:
        with self._writing(run, hold) as (session, current):
            leases.fail(session, current, "invalid_config", detail, self.actor, hold.lease_token)

    def _delay(self, run: Run, hold: Hold, error: OSError | JobRefused, now: float) -> None:
        """Try again later to submit a job: a full disk or a busy Ray is no fault of the run."""
        reason, message = "setup_failed", str(error)
        if isinstance(error, OSError):
            reason = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else reason
            message = f"the run's folder cannot be used: {error}; free space or check GXPO_ARTIFACT_ROOT"
        hold.refusals += 1
        hold.not_before = now + decisions.pause_before_launch(hold.refusals + 1)
        if hold.refusal != (reason, message):
            hold.refusal = reason, message
            _LOG.warning("job cannot be submitted; retrying", run=run.id, why=message)
            with self._writing(run, hold) as (session, _):
                events.record(session, run.number, self.actor, _DELAYED, message)

    def _stop(self, run: Run, job_id: str, hold: Hold, why: str) -> None:
        """Stop the job; repeated in each round until it has ended."""
        self.launcher.stop(job_id)
        if hold.stopping is None or hold.stopping[0] != job_id:
            hold.stopping = job_id, why
            _LOG.warning("job is being stopped", run=run.id, job=job_id, why=why)
            with self._writing(run, hold) as (session, _):
                events.record(session, run.number, self.actor, "stop", f"job {job_id} is stopped: {why}")

    def _finish(self, run: Run, hold: Hold, job: JobStatus, why: str) -> None:
        """The launch is over: ingest its remaining files, then apply its outcome or relaunch the run."""
        folder = self.settings.artifacts / run.id
        if kill_orphaned_trainer(folder):
            return  # just killed: its files may still change
        outcome = drain(self.database, run.id, folder, run.launch, hold.lease_token)
        if hold.stopping is not None and hold.stopping[0] == run.job_id:
            why = f"{hold.stopping[1]}; {why}"
        with self._writing(run, hold) as (session, current):
            if current.launch != run.launch:
                return
            if outcome is not None and lifecycle.apply_outcome(
                session, current, outcome, actor=self.actor, lease_token=hold.lease_token
            ):
                return
            reason = None
            if outcome is not None and outcome.recoverable:
                reason, why = outcome.reason, f"{outcome.reason}: {outcome.message}"
            elif (failure := leases.reported_failure(session, current)) is not None:
                reason, why = failure
            elif hold.refusal is not None:
                reason, why = hold.refusal[0], f"its job could not be submitted within start_s: {hold.refusal[1]}"
            secret = self._conclude(session, current, hold, job, why, reason)
        hold.secret, hold.refusals, hold.refusal = secret, 0, None
        self.counters.recoveries += secret is not None
        _LOG.info("launch over", run=run.id, launch=run.launch, why=why, state=str(current.state))

    def _conclude(
        self, session: Session, run: Run, hold: Hold, job: JobStatus, why: str, reason: str | None
    ) -> str | None:
        """Conclude a launch that left no final outcome; returns the secret of the next launch, if any.

        reason: of a recoverable failure that the trainer itself reported, or of a job that could not be submitted.
        """
        state, actor, token = RunState(run.state), self.actor, hold.lease_token
        given_up = {RunState.CANCELLING: RunState.CANCELLED, RunState.PAUSING: RunState.PAUSED}
        if state in given_up:
            lifecycle.move(session, run, given_up[state], actor=actor, message=why, lease_token=token)
            return None
        forgotten = job.state == "unknown" and state is RunState.RUNNING and reason is None
        kind, name = (_FORGOTTEN, "max_forgotten") if forgotten else (_LOST, "max_recoveries")
        lost_at = [*leases.lost_at(session, run.number, kind), run.step]
        message = f"job {run.job_id} was lost at step {run.step}: {why}"
        events.record(session, run.number, actor, kind, message, step=run.step)
        losses, limit = decisions.losses_without_progress(lost_at), getattr(self.settings, name)
        if losses > limit:
            detail = f"{why}; {losses} consecutive jobs were lost without progress, and {name} is {limit}"
            if forgotten:
                detail += "; check whether the run itself crashes Ray, e.g. by its memory use"
            elif job.message:
                detail += f"; the launcher reported: {job.summary}"
            reason = reason or decisions.failure_reason(state, job)
            leases.fail(session, run, reason, detail, actor, token)
            return None
        now = self.clock()
        hold.not_before = now + decisions.pause_before_launch(losses)
        return leases.relaunch(session, run, token, actor, now, counted=not forgotten, message=why)
