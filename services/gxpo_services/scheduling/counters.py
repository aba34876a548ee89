"""What a scheduler has done since its start, written to the database for `/metrics`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import delete
from sqlalchemy.orm import Session

from gxpo_services.db.tables.schedulers import SchedulerRow

KEPT_S = 86_400.0
"""Time after its last round in which a scheduler that is gone is still shown."""


@dataclass(slots=True)
class Counters:
    """launches: jobs submitted. recoveries: runs relaunched. lost_leases: runs that another scheduler took over.

    claims: runs taken from the queue. queue_wait_s: the sum of their waits.
    """

    launches: int = 0
    recoveries: int = 0
    lost_leases: int = 0
    claims: int = 0
    queue_wait_s: float = 0.0

    def write(self, session: Session, owner: str, now: float) -> None:
        """Store the counters of a scheduler, and forget schedulers that are long gone."""
        session.merge(SchedulerRow(owner=owner, ticked_at=now, **asdict(self)))
        session.execute(delete(SchedulerRow).where(SchedulerRow.ticked_at < now - KEPT_S))
