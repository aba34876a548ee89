"""Look-up of a run by its public id."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Run
from gxpo_services.run_states import RunState


def find_run(session: Session, run_id: str) -> tuple[int, RunState] | None:
    """Number and state of a run."""
    row = session.execute(select(Run.number, Run.state).where(Run.id == run_id)).one_or_none()
    return None if row is None else (row.number, RunState(row.state))
