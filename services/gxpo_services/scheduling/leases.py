"""SQL of the scheduler: leases on executing runs, the queue, launches, and what a scheduler has done.

A lease has an owner, a fencing token and an expiry. Each claim and take-over increments the token, and every write of a
scheduler names the token that it holds, so a stale scheduler changes nothing. Expiry uses the schedulers' wall clocks,
which must agree to within a fraction of `lease_s`; one far beyond any lease is from before the clock was set back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select, update
from sqlalchemy.orm import Session

from gxpo_services.api.principals import hash_token, new_token
from gxpo_services.db.tables import Event, Run, RunDocument
from gxpo_services.ingest.reports import LAUNCH_FAILED
from gxpo_services.outputs import events
from gxpo_services.run_states import EXECUTING, RunState
from gxpo_services.runs import lifecycle
from gxpo_services.scheduling.decisions import Candidate

IS_EXECUTING: ColumnElement[bool] = Run.state.in_(sorted(EXECUTING))
IS_QUEUED: ColumnElement[bool] = Run.state == RunState.QUEUED
_QUEUE_LOCK = 0x67787175  # "gxqu"


def renew(session: Session, owner: str, until: float, before: float) -> dict[str, int]:
    """Extend the leases of `owner` that end before `before`; returns run id → lease token of all runs it still holds.

    Not all of them each time: the rows of executing runs are locked meanwhile, and their trainers report.
    """
    # One that ends later than a new one is of before the clock was set back.
    due = or_(Run.lease_expires_at < before, Run.lease_expires_at > until)
    unlocked = _unlocked(Run.lease_owner == owner, due)
    query = update(Run).where(Run.number.in_(unlocked)).values(lease_expires_at=until)
    session.execute(query.execution_options(synchronize_session=False))
    rows = session.execute(select(Run.id, Run.lease_token).where(Run.lease_owner == owner, IS_EXECUTING))
    return dict(rows.all())


def take_over(session: Session, owner: str, now: float, until: float) -> dict[str, int]:
    """Take over every executing run without a lease or with an expired one; returns run id → new lease token."""
    expired = or_(Run.lease_expires_at < now, Run.lease_expires_at > until + (until - now))
    free = or_(Run.lease_owner.is_(None), Run.lease_expires_at.is_(None), expired)
    values = {"lease_owner": owner, "lease_token": Run.lease_token + 1, "lease_expires_at": until}
    query = update(Run).where(Run.number.in_(_unlocked(free))).values(values).returning(Run.id, Run.lease_token)
    return dict(session.execute(query.execution_options(synchronize_session=False)).all())


def _unlocked(*conditions: ColumnElement[bool]) -> Select[int]:
    """Executing runs that no other transaction has locked; the others have their turn in the next round. Two
    transactions that each wait for a row of the other are a deadlock."""
    return select(Run.number).where(IS_EXECUTING, *conditions).with_for_update(key_share=True, skip_locked=True)


def held(session: Session, run_id: str, owner: str, lease_token: int) -> Run | None:
    """The current row of a run; None when `owner` no longer holds it or it no longer executes."""
    query = select(Run).where(Run.id == run_id, Run.lease_owner == owner, Run.lease_token == lease_token, IS_EXECUTING)
    return session.scalar(query)


def lock(session: Session, numbers: Sequence[int]) -> None:
    """Lock runs in the order of their ids, as all requests about several runs do."""
    if numbers:
        session.execute(select(Run.number).where(Run.number.in_(numbers)).order_by(Run.id).with_for_update())


def queued(session: Session, number: int) -> Run:
    """The current row of a queued run. Raises NoResultFound when it is no longer queued."""
    return session.scalars(select(Run).where(Run.number == number, IS_QUEUED)).one()


def lock_queue(session: Session) -> None:
    """Serialize claims of all schedulers, so that quotas hold. SQLite serializes write transactions anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_QUEUE_LOCK)))


def candidates(session: Session, condition: ColumnElement[bool]) -> list[Candidate]:
    """Runs of every scheduler with IS_QUEUED, or IS_EXECUTING, which count against quotas."""
    placement = RunDocument.config["placement"]
    needs_gpus = placement["device"].as_string() == "gpu"
    shares = (placement[name].as_string() for name in ("learner_cpus", "sampler_cpus", "verifier_cpus"))
    auto_cpus = func.coalesce(or_(*(share == "auto" for share in shares)), False)
    columns = (Run.number, Run.created_by_id, Run.cpus, Run.gpus, Run.priority, Run.queued_at, needs_gpus, auto_cpus)
    query = select(*columns).join(RunDocument, RunDocument.run_number == Run.number).where(condition)
    return [Candidate(*row) for row in session.execute(query)]


def lost_at(session: Session, run_number: int, kind: str) -> list[int]:
    """Steps at which jobs of a run were lost, from the schedulers' events of this kind, oldest first."""
    # A trainer chooses the kinds of its own events, so the actor must be a scheduler.
    query = select(Event.fields).where(
        Event.run_number == run_number, Event.kind == kind, Event.actor.startswith("scheduler:")
    )
    return [int(fields["step"]) for fields in session.scalars(query.order_by(Event.number))]


def reported_failure(session: Session, run: Run) -> tuple[str | None, str] | None:
    """Reason and message of the recoverable failure that the trainer of the run's launch reported, if any."""
    query = select(Event.fields, Event.message).where(
        Event.run_number == run.number, Event.kind == LAUNCH_FAILED, Event.actor == events.SERVICE
    )
    row = session.execute(query.order_by(Event.number.desc()).limit(1)).first()
    return None if row is None or row.fields["launch"] != run.launch else (row.fields["reason"], row.message)


def begin(session: Session, run: Run, *, owner: str, actor: str, now: float, until: float) -> str:
    """Move a run from queued to starting under a lease of `owner`; returns the secret of the new launch.

    Raises StateChanged when the run is no longer queued.
    """
    token = run.lease_token
    secret, values = _next_launch(run, now)
    message = f"launch {values['launch']} started"
    # Fenced by the old token, which every claim increments.
    lifecycle.move(session, run, RunState.STARTING, actor=actor, message=message, lease_token=token, **values)
    lifecycle.change(session, run, token, lease_owner=owner, lease_token=token + 1, lease_expires_at=until)
    return secret


def relaunch(
    session: Session, run: Run, lease_token: int, actor: str, now: float, *, counted: bool, message: str
) -> str:
    """Relaunch a run from its last checkpoint; returns the secret of the new launch.

    counted: whether it counts against `max_recoveries`. Raises StateChanged.
    """
    secret, values = _next_launch(run, now)
    values["recoveries"] = run.recoveries + counted
    message = f"launch {values['launch']} started: {message}"
    if run.state != RunState.RECOVERING:
        values |= {"actor": actor, "message": message, "lease_token": lease_token}
        lifecycle.move(session, run, RunState.RECOVERING, **values)
    else:
        lifecycle.change(session, run, lease_token, updated_at=now, **values)
        events.record(session, run.number, actor, "recovery", message)
    return secret


def fail(session: Session, run: Run, reason: str, detail: str, actor: str, lease_token: int) -> None:
    move = partial(lifecycle.move, session, run, actor=actor, lease_token=lease_token)
    if run.state == RunState.QUEUED:  # queued runs cannot fail
        move(RunState.STARTING, message="the run is about to start")
    move(RunState.FAILED, message=f"{reason}: {detail}", reason=reason, detail=detail)


def _next_launch(run: Run, now: float) -> tuple[str, dict[str, Any]]:
    secret, launch = new_token("run"), run.launch + 1
    return secret, {
        "launch": launch,
        "job_id": f"{run.id}-{launch}",
        "run_token_sha256": hash_token(secret),
        "launched_at": now,
        "heartbeat_at": None,
        "phase": None,
        "last_batch": 0,
    }
