"""Supervision of one executing run: start, watch and stop its job, and record the outcome.

Prepare a run's folder for a launch, and kill an orphaned trainer of an earlier one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.orm import Session

from gxpo_services import logging
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.ingest.drain import drain, forget_lost_lines
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.runs import configs, lifecycle
from gxpo_services.scheduling import launches, leases, supervision
from gxpo_services.scheduling.launcher import Job, JobRefused, JobStatus, Launcher
from gxpo_services.scheduling.rounds import Counters
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.runtime.locks import LOCK, process_start

CONFIG, SERVICE, LOG = "config.toml", "service.json", "train.log"


def prepare(folder: Path, run: Run, *, url: str, token: str) -> None:
    """Write config.toml and service.json (mode 0600), each atomically.

    Raises pydantic's ValidationError for a config that this version does not support, OSError.
    """
    text = to_toml(RunConfig.model_validate(run.config), [f"run {run.id}"])
    address = {"url": url, "run": run.id, "attempt": run.launch, "token": token}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, text, 0o644)
    _replace(folder / SERVICE, json.dumps(address, indent=2) + "\n", 0o600)


def kill_orphaned_trainer(folder: Path) -> bool:
    """Kill a trainer on this machine that still holds the folder's lock; returns whether there was one.

    Its job is over, e.g. because Ray's head was restarted. An orphan on another machine is not reachable from here: its
    token is invalid, so it stops at its next step.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _kill(folder, os.pread(lock, 100, 0).split())
    else:
        return False
    finally:
        os.close(lock)


def _kill(folder: Path, holder: list[bytes]) -> bool:
    """Kill the process recorded in a lock after verifying its identity; returns whether it was killed."""
    try:
        pid, start = (int(word) for word in holder)
        process = os.pidfd_open(pid)
    except (ValueError, ProcessLookupError):
        return False
    try:
        # The pidfd refers to this process even if its pid is reused.
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if process_start(pid) != start or os.fsencode(folder) not in command:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return False
    finally:
        os.close(process)
    return True


def _replace(path: Path, text: str, mode: int) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


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


class RunSupervisor:
    """Supervises runs. The database is written first, fenced by the lease token; jobs are started and stopped after.

    A crash in between leaves a run without its job, which the next holder of the lease starts with a new secret.

    max_recoveries bounds the consecutive losses of a job without progress of the run. A job unknown to the launcher
    (Ray was restarted) counts against max_forgotten instead: usually the run did not cause it. Missed heartbeats count
    only while the API was reachable and this scheduler was running. A job that cannot be submitted is tried again until
    start_s.
    """

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        launcher: Launcher,
        *,
        owner: str,
        command: Callable[[Path], Sequence[str]],
        api_answers: Callable[[], bool],
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._database, self._settings, self._launcher = database, settings, launcher
        self._owner, self._actor = owner, f"scheduler:{owner}"
        self._command, self._api_answers, self._clock = command, api_answers, clock
        self._limits = supervision.Limits(
            settings.start_s, settings.heartbeat_s, settings.cancel_grace_s, settings.pause_grace_s
        )
        self._api_away_at = 0.0
        self._ending: dict[str, float] = {}
        self._log = logging.get_logger(__name__)

    def advance(self, run_id: str, hold: Hold) -> bool:
        """Take the next action for a run; False when this scheduler no longer holds it.

        Raises StateChanged after a concurrent change, LauncherUnavailable, JobRefused when a job cannot be stopped.
        """
        with self._database.reading() as session:
            run = leases.held(session, run_id, self._owner, hold.lease_token)
        if run is None or run.job_id is None:
            return False
        job = self._launcher.status(run.job_id)
        now = self._clock()
        action, why = supervision.next_action(
            RunState(run.state),
            job,
            launch_age_s=now - (run.launched_at or now),
            silence_s=self._silence(run, hold, now),
            request_age_s=now - (run.request_at or now),
            limits=self._limits,
        )
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

    def dropped(self, run_id: str) -> None:
        """Forget a run. If it has ended, its job should end shortly."""
        with self._database.reading() as session:
            job_id = leases.job_of_ended(session, run_id)
        if job_id is not None:
            self.end_job(job_id)

    def end_job(self, job_id: str) -> None:
        """Stop a job unless it ends by itself within cancel_grace_s."""
        if job_id not in self._ending:
            self._ending[job_id] = self._clock()
            self._log.info("job outlives its run", job=job_id)

    def end_jobs(self) -> None:
        """Stop jobs that outlive their run, to free their resources."""
        for job_id, since in list(self._ending.items()):
            if not self._launcher.status(job_id).is_alive:
                del self._ending[job_id]
            elif self._clock() - since > self._settings.cancel_grace_s:
                with suppress(JobRefused):  # retried in the next round
                    self._launcher.stop(job_id)

    def _silence(self, run: Run, hold: Hold, now: float) -> float:
        """Seconds since the last heartbeat, excluding outages of the API."""
        last_seen = max(run.heartbeat_at or 0.0, run.launched_at or 0.0, hold.since, self._api_away_at)
        if now - last_seen > API_PROBE_FRACTION * self._settings.heartbeat_s and not self._api_answers():
            self._api_away_at = last_seen = now
        return now - last_seen

    def _submit(self, run: Run, job_id: str, hold: Hold) -> None:
        folder = self._folder(run)
        refused = configs.refusals(run.config, self._settings)
        if refused:  # a symbolic link or the server's settings may have changed since
            named = "; ".join(f"{path}: {why}" for path, why in refused)
            self._fail(run, hold, "invalid_config", f"the server no longer allows it: {named}")
            return
        before = launches.job_id(run.id, run.launch - 1)
        if self._launcher.status(before).is_alive:  # e.g. paused and resumed while it is ending
            self._launcher.stop(before)
            return
        if kill_orphaned_trainer(folder):
            return
        if hold.secret is None:
            with self._database.writing() as session:
                found = leases.held(session, run.id, self._owner, hold.lease_token)
                if found is None or found.state != run.state:
                    return
                secret = launches.renew_secret(session, found, lease_token=hold.lease_token)
            hold.secret = secret
        forget_lost_lines(self._database, run.id, folder, run.launch, hold.lease_token)
        try:
            prepare(folder, run, url=self._settings.api_url, token=hold.secret)
        except ValidationError as error:
            self._fail(run, hold, "invalid_config", f"this version does not support the run's config: {error}")
            return
        env = {
            "GXPO_REWARD_ALLOWLIST": ",".join(self._settings.allowed_rewards),
            "GXPO_REWARD_URLS": ",".join(self._settings.allowed_reward_urls),
            "GXPO_ENVIRONMENT_ALLOWLIST": ",".join(self._settings.allowed_environments),
            "GXPO_ENVIRONMENT_URLS": ",".join(self._settings.allowed_environment_urls),
            # Ray's default of 3 s between SIGTERM and SIGKILL is too short for a checkpoint.
            "RAY_JOB_STOP_WAIT_TIME_S": str(self._settings.stop_wait_s),
        }
        command = tuple(self._command(folder))
        self._launcher.submit(Job(job_id, command, folder / LOG, env, owner=run.created_by))
        self._counters.launches += 1
        hold.refusals, hold.refusal = 0, None
        self._log.info("job submitted", run=run.id, job=job_id)

    def _delay(self, run: Run, hold: Hold, error: OSError | JobRefused, now: float) -> None:
        """Try again later to submit a job: a full disk or a busy Ray is no fault of the run."""
        reason, message = "setup_failed", str(error)
        if isinstance(error, OSError):
            reason = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else reason
            message = f"the run's folder cannot be used: {error}; free space or check GXPO_ARTIFACT_ROOT"
        hold.refusals += 1
        hold.not_before = now + supervision.pause_before_launch(hold.refusals + 1)
        if hold.refusal != (reason, message):
            hold.refusal = reason, message
            self._log.warning("job cannot be submitted; retrying", run=run.id, why=message)
            with self._database.writing() as session:
                if leases.held(session, run.id, self._owner, hold.lease_token) is not None:
                    events.record(session, run.number, self._actor, _DELAYED, message)

    def _stop(self, run: Run, job_id: str, hold: Hold, why: str) -> None:
        """Stop the job; repeated in each round until it has ended."""
        self._launcher.stop(job_id)
        if hold.stopping is None or hold.stopping[0] != job_id:
            hold.stopping = job_id, why
            self._log.warning("job is being stopped", run=run.id, job=job_id, why=why)
            with self._database.writing() as session:
                if leases.held(session, run.id, self._owner, hold.lease_token) is None:
                    return
                events.record(session, run.number, self._actor, "stop", f"job {job_id} is stopped: {why}")

    def _finish(self, run: Run, hold: Hold, job: JobStatus, why: str) -> None:
        """The launch is over: ingest its remaining files, then apply its outcome or relaunch the run."""
        folder = self._folder(run)
        if kill_orphaned_trainer(folder):
            return  # just killed: its files may still change
        outcome = drain(self._database, run.id, folder, run.launch, hold.lease_token)
        if hold.stopping is not None and hold.stopping[0] == run.job_id:
            why = f"{hold.stopping[1]}; {why}"
        with self._database.writing() as session:
            found = leases.held(session, run.id, self._owner, hold.lease_token)
            if found is None or found.launch != run.launch:
                return
            if outcome is not None and lifecycle.apply_outcome(
                session, found, outcome, actor=self._actor, lease_token=hold.lease_token
            ):
                return
            reason = None
            if outcome is not None and outcome.recoverable:
                reason, why = outcome.reason, f"{outcome.reason}: {outcome.message}"
            elif hold.refusal is not None:
                reason, why = hold.refusal[0], f"its job could not be submitted within start_s: {hold.refusal[1]}"
            secret = self._conclude(session, found, hold, job, why, reason)
        hold.secret, hold.refusals, hold.refusal = secret, 0, None
        self._counters.recoveries += secret is not None
        self._log.info("launch over", run=run.id, launch=run.launch, why=why, state=str(found.state))

    def _conclude(
        self, session: Session, run: Run, hold: Hold, job: JobStatus, why: str, reason: str | None
    ) -> str | None:
        """Conclude a launch that left no final outcome; returns the secret of the next launch, if any.

        reason: of a recoverable failure that the trainer itself reported, or of a job that could not be submitted.
        """
        state = RunState(run.state)
        given_up = {RunState.CANCELLING: RunState.CANCELLED, RunState.PAUSING: RunState.PAUSED}
        if state in given_up:
            lifecycle.move(session, run, given_up[state], actor=self._actor, message=why, lease_token=hold.lease_token)
            return None
        forgotten = job.state == "unknown" and state is RunState.RUNNING and reason is None
        losses = self._losses(session, run, _FORGOTTEN if forgotten else _LOST, why)
        too_often = self._too_often(losses, job, forgotten=forgotten)
        if too_often is not None:
            reason = reason or supervision.failure_reason(state, job)
            detail = f"{why}; {too_often}"
            launches.fail(session, run, reason, detail, actor=self._actor, lease_token=hold.lease_token)
            return None
        now = self._clock()
        hold.not_before = now + supervision.pause_before_launch(losses)
        return launches.relaunch(
            session,
            run,
            lease_token=hold.lease_token,
            actor=self._actor,
            now=now,
            counted=not forgotten,
            message=why,
        )

    def _losses(self, session: Session, run: Run, kind: str, why: str) -> int:
        """Record the loss of a job; returns the number of consecutive ones without progress."""
        message = f"job {run.job_id} was lost at step {run.step}: {why}"
        before = leases.lost_at(session, run.number, kind)
        events.record(session, run.number, self._actor, kind, message, step=run.step)
        return supervision.losses_without_progress([*before, run.step])

    def _too_often(self, losses: int, job: JobStatus, *, forgotten: bool) -> str | None:
        """Why a loss is one too many, or None."""
        name = "max_forgotten" if forgotten else "max_recoveries"
        limit = getattr(self._settings, name)
        if losses <= limit:
            return None
        last = f"; the launcher reported: {job.summary}" if job.message else ""
        advice = "; check whether the run itself crashes Ray, e.g. by its memory use" if forgotten else last
        return f"{losses} consecutive jobs were lost without progress, and {name} is {limit}{advice}"

    def _fail(self, run: Run, hold: Hold, reason: str, detail: str) -> None:
        with self._database.writing() as session:
            found = leases.held(session, run.id, self._owner, hold.lease_token)
            if found is not None:
                launches.fail(session, found, reason, detail, actor=self._actor, lease_token=hold.lease_token)

    def _folder(self, run: Run) -> Path:
        return self._settings.artifacts / run.id
