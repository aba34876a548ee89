"""Tables of runs and groups. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.ext.associationproxy import AssociationProxy, association_proxy
from sqlalchemy.orm import Mapped, mapped_column, relationship

from gxpo_services.db.base import Base, Json, Number
from gxpo_services.run_states import RunState

STUDY = "study"
"""Kind of a group whose runs the service queues."""


class Group(Base):
    """Runs that belong together, such as a sweep."""

    __tablename__ = "groups"

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(20), default="sweep")
    spec: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    """The request that created it: base config, grid, seeds."""
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(100))


class Run(Base):
    """A run: state, lease, progress and the settings that lists show.

    Lists scan thousands of these rows, so large values are in RunDocument.
    """

    __tablename__ = "runs"

    number: Mapped[int] = mapped_column(Number, primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    notes: Mapped[str] = mapped_column(Text, default="")
    priority: Mapped[int] = mapped_column(default=0)
    archived: Mapped[bool] = mapped_column(default=False)
    group_number: Mapped[int | None] = mapped_column(ForeignKey("groups.number"), index=True)
    group_values: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """The settings that this run of a sweep has, by dotted path."""
    parent_id: Mapped[str | None] = mapped_column(String(32))
    """The run that this one is a clone or a retry of."""
    parent_kind: Mapped[str | None] = mapped_column(String(10))

    config_sha256: Mapped[str] = mapped_column(String(64), index=True)
    rule: Mapped[str] = mapped_column(String(20))
    rule_label: Mapped[str] = mapped_column(String(100))
    model: Mapped[str] = mapped_column(String(400), index=True)
    seed: Mapped[int] = mapped_column(BigInteger)
    step_budget: Mapped[int | None] = mapped_column(BigInteger)
    backward_passes_budget: Mapped[int | None] = mapped_column(BigInteger)
    tokens_budget: Mapped[int | None] = mapped_column(BigInteger)
    hours_budget: Mapped[float | None]
    cpus: Mapped[float]
    gpus: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(100))
    """Name of the token."""
    created_by_id: Mapped[str] = mapped_column(String(32))

    state: Mapped[RunState] = mapped_column(String(20))
    reason: Mapped[str | None] = mapped_column(String(40))
    """Why it failed (errors.REASONS), or steps_done, budget_reached."""
    detail: Mapped[str] = mapped_column(Text, default="")
    ended_by: Mapped[str | None] = mapped_column(String(20))
    created_at: Mapped[float]
    updated_at: Mapped[float]
    queued_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]

    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_token: Mapped[int] = mapped_column(Number, default=0)
    """Fencing token: incremented by each claim; a write under an older one changes nothing."""
    lease_expires_at: Mapped[float | None]
    launch: Mapped[int] = mapped_column(default=0)
    """Jobs launched so far; the trainer calls it its attempt at the service."""
    job_id: Mapped[str | None] = mapped_column(String(64))
    run_token_sha256: Mapped[str | None] = mapped_column(String(64))
    launched_at: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    phase: Mapped[str | None] = mapped_column(String(200))
    """What the trainer said last that it is doing; None unless a launch executes."""
    request_at: Mapped[float | None] = mapped_column("wish_at")
    """Time of the pause or cancel request, for the grace period."""
    recoveries: Mapped[int] = mapped_column(default=0)

    last_batch: Mapped[int] = mapped_column(default=0)
    """Newest batch of this launch that was applied."""
    offsets: Mapped[dict[str, int]] = mapped_column(Json, default=dict)
    """Lines of each file that were received."""
    attempt: Mapped[int] = mapped_column(default=0)
    step: Mapped[int] = mapped_column(default=0)
    backward_passes: Mapped[float] = mapped_column(default=0.0)
    tokens: Mapped[float] = mapped_column(default=0.0)
    training_s: Mapped[float] = mapped_column(default=0.0)
    score: Mapped[float | None]
    """Latest eval/average/pass@1."""
    score_best: Mapped[float | None]
    score_step: Mapped[int | None]
    pruned_at: Mapped[float | None]
    """When retention deleted samples and log; None while they are kept."""

    tags: Mapped[list[RunTag]] = relationship(cascade="all, delete-orphan", lazy="selectin")
    group: Mapped[Group | None] = relationship(lazy="joined")
    document: Mapped[RunDocument] = relationship(cascade="all, delete-orphan", passive_deletes=True, lazy="joined")
    config: AssociationProxy[dict[str, Any]] = association_proxy(
        "document", "config", creator=lambda config: RunDocument(config=config)
    )
    identity: AssociationProxy[dict[str, Any] | None] = association_proxy("document", "identity")
    search: Mapped[RunSearch] = relationship(cascade="all, delete-orphan", passive_deletes=True)
    search_text: AssociationProxy[str] = association_proxy("search", "text", creator=lambda text: RunSearch(text=text))

    __table_args__ = (
        # Covering indexes for pages and totals of the list; none contains a column that every report changes.
        Index("ix_runs_created", "archived", "created_at", "number"),
        Index("ix_runs_state", "archived", "state", "created_at", "number"),
        Index("ix_runs_name", "archived", "name", "number"),
        Index("ix_runs_rule", "archived", "rule", "state", "created_at", "number"),
        Index("ix_runs_score", "archived", "score", "number"),
        Index("ix_runs_score_best", "archived", "score_best", "number"),
        Index("ix_runs_queue", "state", "priority", "queued_at", "number"),
    )


class RunDocument(Base):
    """The config and the identity of a run."""

    __tablename__ = "run_documents"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    config: Mapped[dict[str, Any]] = mapped_column(Json)
    """Every setting (configs.stored)."""
    identity: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """run.json: versions, hardware, hashes of data and policy."""


class RunSearch(Base):
    """Searchable text of a run; searches scan the whole table, so its rows are narrow."""

    __tablename__ = "run_searches"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)
    """repository.search_text"""


class RunTag(Base):
    """A word on a run."""

    __tablename__ = "run_tags"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(60), primary_key=True, index=True)
