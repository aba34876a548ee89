"""SQL of runs: finding them, and changing their state by compare-and-set."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from gxpo_services.runs.models import Run
from gxpo_services.runs.states import RunState


def find(session: Session, run_id: str) -> Run | None:
    """A run by its public id."""
    return session.scalar(select(Run).where(Run.id == run_id))


def count_by_state(session: Session) -> dict[RunState, int]:
    rows = session.execute(select(Run.state, func.count()).group_by(Run.state))
    return {RunState(state): count for state, count in rows}


def set_where(
    session: Session, run: Run, values: dict[str, Any], *, state: RunState, lease_token: int | None = None
) -> bool:
    """Write `values` if the run still is in `state` (and, for a scheduler, still under its lease); whether it was.

    The object that the caller holds is refreshed either way.
    """
    query = update(Run).where(Run.number == run.number, Run.state == state)
    if lease_token is not None:
        query = query.where(Run.lease_token == lease_token)
    done = session.execute(query.values(**values).execution_options(synchronize_session=False)).rowcount == 1  # type: ignore[attr-defined]
    session.refresh(run)
    return done
