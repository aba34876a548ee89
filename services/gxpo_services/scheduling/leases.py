"""SQL of the scheduler: leases on executing runs, the queue and jobs.

A lease has an owner, a fencing token and an expiry. Each claim and take-over increments the token, and every write of a
scheduler names the token that it holds, so a stale scheduler changes nothing. Expiry uses the wall clocks of the
schedulers, which must agree to within a fraction of `lease_s`.

Which queued runs may start now: quotas, priorities, and fairness among submitters. Pure.

Order: priority, then the submitter with the fewest executing runs, then the longest wait. A run that waits for CPUs or
GPUs blocks the runs behind it, otherwise smaller runs would starve it. A run held back by its submitter's own limit
blocks nobody.

Queued runs that are larger than the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.orm import Session

from gxpo_services.db.tables import Event, Run, RunDocument
from gxpo_services.run_states import EXECUTING, RunState

_ROUNDING = 1e-9
"""Logical CPUs are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued or executing run; `priority` and `queued_at` matter only while it is queued.

    needs_gpus: whether it cannot run without `gpus`; otherwise it takes CPUs in a cluster that has none.
    """

    number: int
    submitter: str
    cpus: float
    gpus: float
    priority: int = 0
    queued_at: float = 0.0
    needs_gpus: bool = True

    def gpus_of(self, cluster: float) -> float:
        """GPUs that it holds in a cluster with so many."""
        return self.gpus if self.needs_gpus or cluster > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas of all executing runs together. runs_per_user: per submitter; None: no limit."""

    runs: int
    cpus: float
    gpus: float
    runs_per_user: int | None = None


def misfit(run: Candidate, limits: Limits) -> str | None:
    """Reason why a run could never start, even alone; None if it could."""
    gpus = run.gpus_of(limits.gpus)
    for what, asked, there in (("CPUs", run.cpus, limits.cpus), ("GPUs", gpus, limits.gpus)):
        if asked > there + _ROUNDING:
            return (
                f"the run needs {asked:g} {what}, but only {there:g} are available; lower placement.* "
                f"(CPUs may be fractions), add workers, or raise the service's quota"
            )
    return None


def admit(waiting: Sequence[Candidate], executing: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """The runs to start now, in order; runs that can never fit are skipped."""
    busy = Counter(run.submitter for run in executing)
    cpus = limits.cpus - sum(run.cpus for run in executing)
    gpus = limits.gpus - sum(run.gpus_of(limits.gpus) for run in executing)
    free = limits.runs - len(executing)
    left = [run for run in waiting if misfit(run, limits) is None]
    chosen: list[Candidate] = []
    while free > len(chosen):
        allowed = [run for run in left if limits.runs_per_user is None or busy[run.submitter] < limits.runs_per_user]
        if not allowed:
            break
        first = min(allowed, key=lambda run: (-run.priority, busy[run.submitter], run.queued_at, run.number))
        held = first.gpus_of(limits.gpus)
        if first.cpus > cpus + _ROUNDING or held > gpus + _ROUNDING:
            break
        chosen.append(first)
        left.remove(first)
        busy[first.submitter] += 1
        cpus -= first.cpus
        gpus -= held
    return chosen


_QUEUE_LOCK = 0x67787175  # "gxqu"


def renew(session: Session, owner: str, until: float) -> dict[str, int]:
    """Extend all leases of `owner`; returns run id → lease token of the runs it still holds."""
    query = update(Run).where(Run.lease_owner == owner, _executing()).values(lease_expires_at=until)
    session.execute(query.execution_options(synchronize_session=False))
    rows = session.execute(select(Run.id, Run.lease_token).where(Run.lease_owner == owner, _executing()))
    return {row.id: row.lease_token for row in rows}


def take_over(session: Session, owner: str, now: float, until: float) -> dict[str, int]:
    """Take over every executing run without a lease or with an expired one; returns run id → new lease token."""
    free = or_(Run.lease_owner.is_(None), Run.lease_expires_at.is_(None), Run.lease_expires_at < now)
    found = session.execute(select(Run.number, Run.id, Run.lease_token).where(_executing(), free)).all()
    taken: dict[str, int] = {}
    for number, run_id, token in found:
        query = update(Run).where(Run.number == number, Run.lease_token == token, _executing(), free)
        values = {"lease_owner": owner, "lease_token": token + 1, "lease_expires_at": until}
        if _changed(session, query.values(**values)):
            taken[run_id] = token + 1
    return taken


def num_held_by_others(session: Session, owner: str, run_ids: Collection[str]) -> int:
    """How many of these runs execute under the lease of another scheduler."""
    query = select(func.count()).where(Run.id.in_(run_ids), Run.lease_owner != owner, _executing())
    return session.scalar(query) or 0


def release_all(session: Session, owner: str) -> None:
    """Release every lease, so that the next scheduler does not wait for them to expire."""
    query = update(Run).where(Run.lease_owner == owner).values(lease_owner=None, lease_expires_at=None)
    session.execute(query.execution_options(synchronize_session=False))


def held(session: Session, run_id: str, owner: str, lease_token: int) -> Run | None:
    """The current row of a run; None when `owner` no longer holds it or it no longer executes."""
    query = select(Run).where(Run.id == run_id, Run.lease_owner == owner, Run.lease_token == lease_token, _executing())
    return session.scalar(query)


def current_jobs(session: Session) -> set[str]:
    """Ids of the jobs of all executing runs, of every scheduler."""
    return set(session.scalars(select(Run.job_id).where(_executing(), Run.job_id.is_not(None))))


def job_of_ended(session: Session, run_id: str) -> str | None:
    """The last job of a run that no longer executes; None when it executes or has no job."""
    return session.scalar(select(Run.job_id).where(Run.id == run_id, Run.state.not_in(sorted(EXECUTING))))


def lost_at(session: Session, run_number: int, kind: str) -> list[int]:
    """Steps at which jobs of a run were lost, from the schedulers' events of this kind, oldest first."""
    # A trainer chooses the kinds of its own events, so the actor must be a scheduler.
    query = select(Event.fields).where(
        Event.run_number == run_number, Event.kind == kind, Event.actor.startswith("scheduler:")
    )
    return [int(fields["step"]) for fields in session.scalars(query.order_by(Event.number))]


def set_held(session: Session, run: Run, held_token: int, /, **values: Any) -> bool:
    """Update columns other than the state; False when the run was taken over or has changed its state.

    The object that the caller holds is refreshed either way.
    """
    query = update(Run).where(Run.number == run.number, Run.lease_token == held_token, Run.state == run.state)
    done = _changed(session, query.values(**values))
    session.refresh(run)
    return done


def lock_queue(session: Session) -> None:
    """Serialize claims of all schedulers, so that quotas hold.

    SQLite serializes write transactions anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_QUEUE_LOCK)))


def num_queued(session: Session) -> int:
    return session.scalar(select(func.count()).where(Run.state == RunState.QUEUED)) or 0


def queued(session: Session) -> list[Candidate]:
    """All queued runs."""
    return _candidates(session, Run.state == RunState.QUEUED)


def executing(session: Session) -> list[Candidate]:
    """All runs that count against quotas, of every scheduler."""
    return _candidates(session, _executing())


def by_numbers(session: Session, numbers: Sequence[int]) -> list[Run]:
    """Runs in the order of `numbers`."""
    found = {run.number: run for run in session.scalars(select(Run).where(Run.number.in_(numbers)))}
    return [found[number] for number in numbers if number in found]


def _executing() -> ColumnElement[bool]:
    return Run.state.in_(sorted(EXECUTING))


def _candidates(session: Session, condition: ColumnElement[bool]) -> list[Candidate]:
    needs_gpus = RunDocument.config["placement"]["device"].as_string() == "gpu"
    columns = (Run.number, Run.created_by_id, Run.cpus, Run.gpus, Run.priority, Run.queued_at, needs_gpus)
    query = select(*columns).join(RunDocument, RunDocument.run_number == Run.number).where(condition)
    return [Candidate(*row) for row in session.execute(query)]


def _changed(session: Session, query: Any) -> bool:
    result = session.execute(query.execution_options(synchronize_session=False))
    return bool(result.rowcount == 1)  # type: ignore[attr-defined]


MISFIT_S = 60.0
"""Time that a run larger than the cluster waits for the cluster to grow: a starting one has few CPUs at first."""


class Misfits:
    """Since when each queued run is known to be larger than the cluster."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, float], float] = {}  # by queued_at too: SQLite reuses numbers

    def reset(self) -> None:
        """Call in a round that does not see the cluster: only observed time counts."""
        self._since.clear()

    def too_late(self, waiting: Sequence[Candidate], limits: Limits, now: float) -> dict[int, str]:
        """Number → reason of the runs that have been too large for MISFIT_S. waiting: all queued runs."""
        reasons = {run: why for run in waiting if (why := misfit(run, limits)) is not None}
        keys = {run: (run.number, run.queued_at) for run in reasons}
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        return {run.number: reasons[run] for run, key in keys.items() if now - self._since[key] >= MISFIT_S}
