"""How far alerts have been sent."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base, Number


class AlertCursor(Base):
    """The only row. event_number: of the last event whose alert, if any, was handed to a sender."""

    __tablename__ = "alert_cursor"

    number: Mapped[int] = mapped_column(primary_key=True)
    event_number: Mapped[int] = mapped_column(Number)
