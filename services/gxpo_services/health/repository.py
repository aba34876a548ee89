"""SQL of the service's own metrics."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Run
from gxpo_services.run_states import RunState


def count_by_state(session: Session) -> dict[RunState, int]:
    rows = session.execute(select(Run.state, func.count()).group_by(Run.state))
    return {RunState(state): count for state, count in rows}
