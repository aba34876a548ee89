"""What each scheduler has done since its start, for `/metrics`."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base


class SchedulerRow(Base):
    """A scheduler process, written every few seconds; one that is gone is deleted after a day."""

    __tablename__ = "schedulers"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    ticked_at: Mapped[float]
    launches: Mapped[int]
    recoveries: Mapped[int]
    lost_leases: Mapped[int]
    claims: Mapped[int]
    queue_wait_s: Mapped[float]
    """Sum of the waits of all claimed runs."""
