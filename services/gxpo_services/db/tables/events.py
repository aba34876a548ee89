"""The audit trail."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base, Json, Number


class Event(Base):
    """Something that happened to a run, or to the service when `run_number` is empty, with its actor."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    run_number: Mapped[int | None] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), index=True)
    time: Mapped[float]
    actor: Mapped[str] = mapped_column(String(120))
    """`token:<name>`, `scheduler:<owner>`, `trainer`."""
    kind: Mapped[str] = mapped_column(String(60))
    message: Mapped[str] = mapped_column(Text)
    fields: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
