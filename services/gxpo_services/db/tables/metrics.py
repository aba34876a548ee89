"""Tables of metrics. A block holds one metric's values of up to 128 steps as bytes (metrics/blocks.py)."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base, Number


class MetricName(Base):
    """A metric's name once, so that blocks hold a number."""

    __tablename__ = "metric_names"

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)


class Attempt(Base):
    """The first step that each attempt of a run reported on: from there on it replaces earlier attempts."""

    __tablename__ = "attempts"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    first_step: Mapped[int]


class MetricBlock(Base):
    """One metric of one attempt in the steps [128·block, 128·(block + 1)): records of step and value."""

    __tablename__ = "metric_blocks"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy's own form

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    name_number: Mapped[int] = mapped_column(ForeignKey("metric_names.number"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    block: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class MetricLast(Base):
    """Last and extreme values of one metric of a run, for sorting and tables. NaN is stored as NULL."""

    __tablename__ = "metric_last"
    __table_args__ = (Index("ix_metric_last_sort", "name_number", "last", "run_number"),)

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    name_number: Mapped[int] = mapped_column(ForeignKey("metric_names.number"), primary_key=True)
    last: Mapped[float | None]
    last_step: Mapped[int]
    lowest: Mapped[float | None]
    highest: Mapped[float | None]
