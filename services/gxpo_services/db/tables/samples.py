"""Tables of responses and evaluations."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base, Json, NullableJson, Number


class Sample(Base):
    """One response of a training step, with its verdict."""

    __tablename__ = "samples"
    __table_args__ = (Index("ix_samples_step", "run_number", "step", "attempt"),)

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int]
    time: Mapped[float]
    group_index: Mapped[int]
    sample_index: Mapped[int]
    prompt_id: Mapped[str] = mapped_column(String(300))
    prompt: Mapped[str] = mapped_column(Text)
    response: Mapped[str] = mapped_column(Text)
    extracted: Mapped[str | None] = mapped_column(Text)
    gold: Mapped[str] = mapped_column(Text)
    verdict: Mapped[str] = mapped_column(String(20))
    reward: Mapped[float | None]
    length: Mapped[int]
    truncated: Mapped[bool]
    turns: Mapped[list[dict[str, Any]] | None] = mapped_column(NullableJson)
    """[{speaker, text, reward}] of an episode in an environment; this and the next three are null without one."""
    end: Mapped[str | None] = mapped_column(String(20))
    end_detail: Mapped[str | None] = mapped_column(Text)
    sampled_length: Mapped[int | None]
    extra: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    """Other members of the trainer's line (detail, weights_version, components)."""


class EvaluationRow(Base):
    """One benchmark at one step, as the trainer's line had it."""

    __tablename__ = "evaluations"
    __table_args__ = (Index("ix_evaluations_step", "run_number", "benchmark", "step"),)

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int]
    benchmark: Mapped[str] = mapped_column(String(200))
    record: Mapped[dict[str, Any]] = mapped_column(Json)
    """The whole line; NaN, Infinity and -Infinity are strings."""
