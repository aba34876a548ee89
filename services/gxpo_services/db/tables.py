"""Every table. `metadata` makes an empty database; the migrations bring older ones to it. Times: seconds since 1970."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, MetaData, String, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.associationproxy import AssociationProxy, association_proxy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from gxpo_services.run_states import RunState

# Names for every constraint, so that migrations can drop them on both engines.
NAMING = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

Json = JSON().with_variant(JSONB(), "postgresql")
NullableJson = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
"""None is SQL's NULL, not JSON's null."""
Number = BigInteger().with_variant(Integer(), "sqlite")
"""Row numbers; SQLite auto-increments only INTEGER columns."""

_NUMBERED_ONCE = {"sqlite_autoincrement": True}
"""By default SQLite gives the number of the last row again once that is deleted, and who knows the deleted run by its
number, such as a stream or an export, would take another for it. PostgreSQL never does."""


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING)


class AlertCursor(Base):
    """The only row. event_number: of the last event whose alert, if any, was handed to a sender."""

    __tablename__ = "alert_cursor"

    number: Mapped[int] = mapped_column(primary_key=True)
    event_number: Mapped[int] = mapped_column(Number)


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
    name_number: Mapped[int] = mapped_column(ForeignKey("metric_names.number"), primary_key=True, index=True)
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


STUDY = "study"
"""Kind of a group whose runs the service queues."""
SETTING_ORDER = "setting_order"
"""Member of a sweep's spec: its settings in order, which PostgreSQL does not keep in JSON objects."""


class Group(Base):
    """Runs that belong together, such as a sweep."""

    __tablename__ = "groups"
    __table_args__ = _NUMBERED_ONCE

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
    rule: Mapped[str] = mapped_column(String(200))
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
    recoveries: Mapped[int] = mapped_column(default=0)

    last_batch: Mapped[int] = mapped_column(default=0)
    """Newest batch of this launch that was applied."""
    offsets: Mapped[dict[str, int]] = mapped_column(Json, default=dict)
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
        _NUMBERED_ONCE,
    )


QUEUE_ORDER = (Run.priority.desc(), Run.queued_at, Run.number)
"""Of queued runs, as their places in the queue are counted."""


class RunDocument(Base):
    """The config and the identity of a run."""

    __tablename__ = "run_documents"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    config: Mapped[dict[str, Any]] = mapped_column(Json)
    identity: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """run.json: versions, hardware, hashes of data and policy."""


class RunSearch(Base):
    """Searchable text of a run; searches scan the whole table, so its rows are narrow."""

    __tablename__ = "run_searches"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class RunTag(Base):
    """A word on a run."""

    __tablename__ = "run_tags"

    run_number: Mapped[int] = mapped_column(ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(60), primary_key=True, index=True)


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


class SchedulerRow(Base):
    """What a scheduler has done since its start, written every few seconds; one that is gone is deleted after a day."""

    __tablename__ = "schedulers"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    ticked_at: Mapped[float]
    launches: Mapped[int]
    recoveries: Mapped[int]
    lost_leases: Mapped[int]
    claims: Mapped[int]
    queue_wait_s: Mapped[float]
    """Sum of the waits of claimed runs."""


class AccessToken(Base):
    """A bearer token of a person or a program."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(100))
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """Written every TokenUses.FLUSH_S, so it may be that much older than the last request."""


class IdempotencyKey(Base):
    """Use of an idempotency key: the same key and body get the same response, another body is rejected."""

    __tablename__ = "idempotency_keys"

    token_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    body_sha256: Mapped[str] = mapped_column(String(64))
    resource_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float]


metadata = Base.metadata
