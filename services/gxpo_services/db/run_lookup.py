"""Look-up of a run by its public id."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Run
from gxpo_services.run_states import RunState


def find_run(session: Session, run_id: str, *, lock: bool = False) -> tuple[int, RunState] | None:
    """Number and state of a run. lock: SELECT … FOR UPDATE."""
    query = select(Run.number, Run.state).where(Run.id == run_id)
    row = session.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else (row.number, RunState(row.state))
