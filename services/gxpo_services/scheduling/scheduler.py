"""The scheduler: claims queued runs, launches them as jobs and supervises them.

The database is the source of truth; jobs are disposable. After any crash, the next round derives what to do from the
database and the launcher.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError, NoResultFound

from gxpo_client.client import is_up
from gxpo_services import logging
from gxpo_services.api.idempotency import delete_expired_keys
from gxpo_services.db.database import UNAVAILABLE, Database
from gxpo_services.db.migrate import need_current, upgrade
from gxpo_services.db.tables import Group, Run, SchedulerRow
from gxpo_services.ingest.drain import FILES
from gxpo_services.outputs import events
from gxpo_services.outputs.files import RunFiles
from gxpo_services.outputs.logs import LOG
from gxpo_services.outputs.metrics import delete_unused_names
from gxpo_services.outputs.samples import delete_some
from gxpo_services.run_states import TERMINAL
from gxpo_services.runs.lifecycle import StateChanged
from gxpo_services.scheduling import decisions, leases
from gxpo_services.scheduling.alerts import Alerts
from gxpo_services.scheduling.launcher import JobRefused, JobStatus, Launcher, LauncherUnavailable, trainer_command
from gxpo_services.scheduling.run_supervisor import Hold, RunSupervisor
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps import studies

LONGEST_GAP_FRACTION = 0.5
"""Fraction of heartbeat_s without a renewal of leases (no database, a suspended machine, a clock that jumped) after
which silence, launches and requests count from zero. The other half is for a trainer to report again."""
RECONCILE_EVERY_S = 15.0
"""Interval at which the launcher's jobs are compared with the database; also at the first round."""
CLEAN_EVERY_S = 300.0
COUNT_EVERY_S = 5.0
KEPT_S = 86_400.0
"""Time after its last round in which a scheduler that is gone is still listed."""
CLEANED_AT_ONCE = 500
"""Expired idempotency keys, and metric names without a run, deleted at a time."""
JOBS_KEPT, JOBS_AT_ONCE = 100, 50
"""Ended jobs, of the newest runs, that stay in the launcher's list; others deleted at a time."""
SAMPLES_AT_ONCE, BATCHES_AT_ONCE = 1_000, 20
"""Samples deleted per transaction, so that reports of trainers do not wait; transactions of retention at a time."""
PROBE_S = 2.0
"""Time in which the API must answer at its public address."""
_DAY_S = 86_400.0
LIVENESS_FILE = "scheduler-round"
"""A file in the home whose time is that of the last round, for health checks of the scheduler's container."""
LONGEST_ROUND_S = 120.0
"""A round waits for Ray and for the database, each at most a minute."""


class Scheduler:
    """A scheduler; several may share a database.

    A round (`tick`): renew leases and take over orphaned runs; claim queued runs; supervise each held run
    (run_supervisor.py); every RECONCILE_EVERY_S find jobs without a run; every CLEAN_EVERY_S delete what has expired;
    send alerts of what happened to runs.

    owner: unique per process start. command: of a job, from the run's folder. api_answers: whether trainers can report.
    clock: seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        launcher: Launcher,
        *,
        owner: str | None = None,
        command: Callable[[Path], Sequence[str]] = trainer_command,
        api_answers: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.owner = owner or f"{socket.gethostname()[:30]}:{os.getpid()}:{secrets.token_hex(6)}"
        self._actor = f"scheduler:{self.owner}"
        self._database, self._settings, self._launcher, self._clock = database, settings, launcher, clock
        self._counters = SchedulerRow(
            owner=self.owner, launches=0, recoveries=0, lost_leases=0, claims=0, queue_wait_s=0.0
        )
        self._alerts = Alerts(database, settings)
        self._supervisor = RunSupervisor(
            database,
            settings,
            launcher,
            owner=self.owner,
            actor=self._actor,
            command=command,
            api_answers=api_answers or partial(is_up, f"{settings.api_url}/health/ready", PROBE_S),
            clock=clock,
            counters=self._counters,
        )
        self._held: dict[str, Hold] = {}
        self._counted_at = self._renewed_at = self._clean_at = self._reconcile_at = 0.0
        self._oversized = decisions.OversizedRuns()
        self._errors = logging.ErrorLog()
        self._ended_runs: dict[int, tuple[int, float | None]] = {}
        """Study → `studies.ended_runs` when its next runs were queued."""
        self._outliving: dict[str, float] = {}
        """Live jobs without an executing run → since when that is known."""
        self._pruned_up_to = 0
        self._log = logging.get_logger(__name__)

    def run_forever(self, stop: threading.Event) -> None:
        """Run rounds until `stop` is set, then release the leases; jobs keep running for the next scheduler."""
        self._log.info("scheduler started", owner=self.owner)
        while not stop.is_set():
            with self._errors.outages("database", *UNAVAILABLE):
                self.tick()
            with suppress(OSError):  # a disk that fails is no reason to stop
                (self._settings.home / LIVENESS_FILE).touch()
            stop.wait(self._settings.tick_s)
        with self._errors.outages("database", *UNAVAILABLE), self._database.writing() as session:
            # So that the next scheduler does not wait for the leases to expire.
            query = update(Run).where(Run.lease_owner == self.owner).values(lease_owner=None, lease_expires_at=None)
            session.execute(query.execution_options(synchronize_session=False))
        self._alerts.close()
        self._log.info("scheduler stopped", owner=self.owner)

    def tick(self) -> None:
        """Run one round. Raises one of UNAVAILABLE while the database is unavailable."""
        self._hold_leases()
        self._continue_studies()
        with self._errors.outages("launcher", LauncherUnavailable):
            self._claim()
            # In one request; none while nothing depends on them.
            needed = self._held or self._clock() >= self._reconcile_at
            jobs = self._launcher.statuses(self._settings.artifacts) if needed else {}
            for run_id in self._supervisor.due(self._held, jobs):
                if self._clock() - self._renewed_at > self._settings.lease_s / 3:
                    self._hold_leases()
                if run_id in self._held:
                    self._advance(run_id, self._held[run_id], jobs)
            self._reconcile(jobs)
        self._alerts.send_new()
        self._clean()
        self._count()  # last: a round that raised has not ended

    def _advance(self, run_id: str, hold: Hold, jobs: Mapping[str, JobStatus]) -> None:
        """Supervise a run; an error of one must not stop the others.

        StateChanged: by a user, the trainer or another scheduler; the next round reads the new state.
        """
        passed = (StateChanged, LauncherUnavailable, *UNAVAILABLE)
        with suppress(StateChanged), self._errors.once(run_id, "supervision of run failed", *passed, run=run_id):
            if not self._supervisor.advance(run_id, hold, jobs):
                del self._held[run_id]

    def _continue_studies(self) -> None:
        """Queue the next runs of each study in which a run has ended since the last round."""
        with self._database.reading() as session:
            ended = studies.ended_runs(session)
        for number in [number for number, runs in ended.items() if self._ended_runs.get(number) != runs]:
            with self._errors.once(f"study {number}", "study cannot continue", *UNAVAILABLE, group=number):
                with self._database.writing() as session:
                    leases.lock_queue(session)
                    study = session.get(Group, number, with_for_update=True)
                    if study is not None and (queued := studies.queue_missing(session, study)):
                        self._log.info("study continued", study=study.id, runs=queued)
                self._ended_runs[number] = ended[number]

    def _reconcile(self, jobs: Mapping[str, JobStatus]) -> None:
        """Stop jobs that outlive their run by cancel_grace_s, because they hang or their scheduler was killed; delete
        old ones of runs that are over: the launcher would list them in every round."""
        now = self._clock()
        if now < self._reconcile_at:
            return
        with self._database.reading() as session:
            executing = dict(session.execute(select(Run.id, Run.job_id).where(leases.IS_EXECUTING)).all())
        live = {job_id for job_id, status in jobs.items() if status.is_alive} - set(executing.values())
        self._outliving = {job_id: min(self._outliving.get(job_id, now), now) for job_id in sorted(live)}
        for job_id, since in self._outliving.items():
            if now - since > self._settings.cancel_grace_s:
                self._log.info("job outlives its run", job=job_id)
                with suppress(JobRefused):  # the next time
                    self._launcher.stop(job_id)
        self._reconcile_at = now + RECONCILE_EVERY_S
        ended = sorted(job_id for job_id, status in jobs.items() if not status.is_alive)
        over = [job_id for job_id in ended if job_id.rpartition("-")[0] not in executing]
        with self._errors.outages("deletion of old jobs", JobRefused, LauncherUnavailable):
            for job_id in over[:-JOBS_KEPT][:JOBS_AT_ONCE]:
                if self._clock() - self._renewed_at > self._settings.lease_s / 3:
                    break
                self._launcher.delete(job_id)

    def _clean(self) -> None:
        """Delete a batch of expired idempotency keys, of metric names without a run, and of what is past retention."""
        now, settings = self._clock(), self._settings
        if now < self._clean_at:
            return
        self._clean_at = now + CLEAN_EVERY_S
        with self._database.writing() as session:
            delete_expired_keys(session, now - settings.idempotency_s, CLEANED_AT_ONCE)
        # A report that uses a name again meanwhile keeps it, and all others until the next time.
        with suppress(IntegrityError), self._database.writing() as session:
            delete_unused_names(session, CLEANED_AT_ONCE)
        if settings.retention_days is not None and not self._prune(now - settings.retention_days * _DAY_S, now):
            self._clean_at = now  # goes on in the next round

    def _prune(self, before: float, now: float) -> bool:
        """Delete samples and log of runs that ended before `before`, in the order of their numbers; returns whether
        that is done.

        Everything else of a run is kept; paused runs have not ended. A run is marked as pruned last, so nothing is
        forgotten after a crash. One whose files cannot be deleted is tried again after all others.
        """
        ended = (Run.state.in_(sorted(TERMINAL)), Run.pruned_at.is_(None), Run.ended_at < before)
        for _ in range(BATCHES_AT_ONCE):
            with self._database.writing() as session:
                query = select(Run).where(*ended, Run.number > self._pruned_up_to).order_by(Run.number).limit(1)
                run = session.scalar(query.with_for_update(of=Run, skip_locked=True))
                if run is None:
                    self._pruned_up_to = 0
                    return True
                if delete_some(session, run.number, SAMPLES_AT_ONCE):
                    continue
                self._pruned_up_to = run.number
                message = "cannot delete the files of a run"
                with self._errors.once(f"files of {run.id}", message, *UNAVAILABLE, run=run.id):
                    for name in (FILES["samples"], LOG):
                        RunFiles(self._settings.artifacts, run.id).remove(name)
                    session.execute(update(Run).where(Run.number == run.number).values(pruned_at=now))
                    events.record(session, run.number, self._actor, "pruned", "retention deleted samples and log")
        return False

    # ---- leases and claims ------------------------------------------------------------------------------------

    def _hold_leases(self) -> None:
        now = self._clock()
        with self._database.writing() as session:
            until, before = (now + part * self._settings.lease_s for part in (1.0, 2 / 3))
            held = leases.renew(session, self.owner, until, before)
            taken = leases.take_over(session, self.owner, now, now + self._settings.lease_s)
        for run_id in taken:
            self._log.info("run taken over", run=run_id)
        resumed_at = self._clock()
        set_back = resumed_at < self._renewed_at - self._settings.lease_s
        if set_back or resumed_at - self._renewed_at > LONGEST_GAP_FRACTION * self._settings.heartbeat_s:
            for hold in self._held.values():
                hold.since = resumed_at
                if set_back:
                    hold.not_before = 0.0
            self._oversized.clear()
        if set_back:
            self._counted_at = self._clean_at = self._reconcile_at = 0.0
        self._renewed_at = now
        known = {run_id: hold for run_id, hold in self._held.items() if held.get(run_id) == hold.lease_token}
        dropped = self._held.keys() - known.keys()
        if dropped:
            by_others = (Run.id.in_(dropped), Run.lease_owner != self.owner, leases.IS_EXECUTING)
            with self._database.reading() as session:
                self._counters.lost_leases += session.scalar(select(func.count()).where(*by_others)) or 0
        self._held = {run_id: known.get(run_id) or Hold(token, now) for run_id, token in (held | taken).items()}

    def _count(self) -> None:
        now = self._clock()
        if now < self._counted_at + COUNT_EVERY_S:
            return
        self._counters.ticked_at = now
        with self._database.writing() as session:
            session.merge(self._counters)
            session.execute(delete(SchedulerRow).where(SchedulerRow.ticked_at < now - KEPT_S))
        self._counted_at = now

    def _claim(self) -> None:
        """Claim as many queued runs as quotas allow, in one transaction."""
        with self._database.reading() as session:
            num_queued = session.scalar(select(func.count()).where(leases.IS_QUEUED))
            num_executing = session.scalar(select(func.count()).where(leases.IS_EXECUTING)) or 0
        if not num_queued or num_executing >= self._settings.max_concurrent_runs:
            self._oversized.clear()
            return
        try:
            quotas = self._quotas()
        except LauncherUnavailable:
            self._oversized.clear()
            raise
        now = self._clock()
        claimed: dict[str, tuple[Hold, float]] = {}
        with self._database.writing() as session:
            leases.lock_queue(session)
            waiting = leases.candidates(session, leases.IS_QUEUED)
            reasons = self._oversized.overdue(waiting, quotas, now)
            admitted = decisions.admit(waiting, leases.candidates(session, leases.IS_EXECUTING), quotas)
            leases.lock(session, [*reasons, *(candidate.number for candidate in admitted)])
            for number, why in reasons.items():
                with suppress(StateChanged, NoResultFound):  # cancelled or deleted in between
                    run = leases.queued(session, number)
                    leases.fail(session, run, "no_resources", why, self._actor, run.lease_token)
            until = now + self._settings.lease_s
            for candidate in admitted:
                with suppress(StateChanged, NoResultFound):
                    run = leases.queued(session, candidate.number)
                    secret = leases.begin(session, run, owner=self.owner, actor=self._actor, now=now, until=until)
                    claimed[run.id] = Hold(run.lease_token, now, secret), max(0.0, now - run.queued_at)
        for run_id, (hold, wait_s) in claimed.items():
            self._held[run_id] = hold
            self._counters.claims += 1
            self._counters.queue_wait_s += wait_s
            self._log.info("run claimed", run=run_id)

    def _quotas(self) -> decisions.Quotas:
        settings = self._settings
        cpus, gpus = settings.quota_cpus, settings.quota_gpus
        if cpus is None or gpus is None:
            all_cpus, all_gpus = self._launcher.resources()
            cpus, gpus = all_cpus if cpus is None else cpus, all_gpus if gpus is None else gpus
        return decisions.Quotas(settings.max_concurrent_runs, cpus, gpus, settings.max_runs_per_user)


def is_alive(home: Path) -> bool:
    """Whether a scheduler with this home has made a round within LONGEST_ROUND_S. One in the future is from before the
    clock was set back."""
    try:
        return abs(time.time() - (home / LIVENESS_FILE).stat().st_mtime) <= LONGEST_ROUND_S
    except OSError:  # none yet, or a home that cannot be read
        return False


def serve(
    settings: ServiceSettings, launcher: Launcher, *, command: Callable[[Path], Sequence[str]] = trainer_command
) -> None:
    """Run a scheduler in this process until SIGTERM or SIGINT.

    Raises ConfigError when the database, other than SQLite, is not at this version's schema.
    """
    database = Database(settings.url, settings.database_timeout_s)
    if database.is_sqlite:
        upgrade(settings.url)
    else:
        need_current(settings.url)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    Scheduler(database, settings, launcher, command=command).run_forever(stop)
    database.close()
