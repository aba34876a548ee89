"""SQL of the service's own metrics."""

from __future__ import annotations

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Run
from gxpo_services.db.tables.schedulers import SchedulerRow
from gxpo_services.run_states import EXECUTING, RunState


def count_by_state(session: Session) -> dict[RunState, int]:
    rows = session.execute(select(Run.state, func.count()).group_by(Run.state))
    return {RunState(state): count for state, count in rows}


def queued_since(session: Session) -> float | None:
    """When the run that has waited longest was queued."""
    return session.scalar(select(func.min(Run.queued_at)).where(Run.state == RunState.QUEUED))


def count_without_lease(session: Session, now: float) -> int:
    """Executing runs that no scheduler holds."""
    free = or_(Run.lease_owner.is_(None), Run.lease_expires_at.is_(None), Run.lease_expires_at < now)
    return session.scalar(select(func.count()).where(Run.state.in_(sorted(EXECUTING)), free)) or 0


def sum_recoveries(session: Session) -> int:
    """Recoveries of all runs."""
    return session.scalar(select(func.coalesce(func.sum(Run.recoveries), 0))) or 0


def schedulers(session: Session) -> list[SchedulerRow]:
    return list(session.scalars(select(SchedulerRow).order_by(SchedulerRow.owner)))
