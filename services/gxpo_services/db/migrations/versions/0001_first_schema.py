"""first schema

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_run(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["run_number"], ["runs.number"], name=f"fk_{table}_run_number", ondelete="CASCADE")


def upgrade() -> None:
    op.create_table(
        "groups",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(length=100), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_groups")),
        sa.UniqueConstraint("id", name=op.f("uq_groups_id")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "metric_names",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_metric_names")),
        sa.UniqueConstraint("name", name=op.f("uq_metric_names_name")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(length=100), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
    )
    op.create_table(
        "runs",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("group_number", NUMBER, nullable=True),
        sa.Column("group_values", JSON, nullable=True),
        sa.Column("parent_id", sa.String(length=32), nullable=True),
        sa.Column("parent_kind", sa.String(length=10), nullable=True),
        sa.Column("config", JSON, nullable=False),
        sa.Column("config_sha256", sa.String(length=64), nullable=False),
        sa.Column("rule", sa.String(length=20), nullable=False),
        sa.Column("model", sa.String(length=400), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(length=100), nullable=False),
        sa.Column("created_by_id", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("ended_by", sa.String(length=20), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(length=64), nullable=True),
        sa.Column("lease_token", NUMBER, nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("launch", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("run_token_sha256", sa.String(length=64), nullable=True),
        sa.Column("launched_at", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("wish_at", sa.Double(), nullable=True),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("last_batch", sa.Integer(), nullable=False),
        sa.Column("offsets", JSON, nullable=False),
        sa.Column("identity", JSON, nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("backward_passes", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("training_s", sa.Double(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("score_best", sa.Double(), nullable=True),
        sa.Column("score_step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["group_number"], ["groups.number"], name=op.f("fk_runs_group_number")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
    )
    op.create_index("ix_runs_config_sha256", "runs", ["config_sha256"])
    op.create_index("ix_runs_created", "runs", ["created_at", "number"])
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_created_by_id", "runs", ["created_by_id"])
    op.create_index("ix_runs_group_number", "runs", ["group_number"])
    op.create_index("ix_runs_model", "runs", ["model"])
    op.create_index("ix_runs_name", "runs", ["name"])
    op.create_index("ix_runs_queue", "runs", ["state", "priority", "queued_at"])
    op.create_index("ix_runs_rule", "runs", ["rule"])
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_table(
        "attempts",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.Integer(), nullable=False),
        _of_run("attempts"),
        sa.PrimaryKeyConstraint("run_number", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "evaluations",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("benchmark", sa.String(length=200), nullable=False),
        sa.Column("record", JSON, nullable=False),
        _of_run("evaluations"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_evaluations")),
    )
    op.create_index("ix_evaluations_step", "evaluations", ["run_number", "benchmark", "step"])
    op.create_table(
        "events",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("run_number", NUMBER, nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=60), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("fields", JSON, nullable=False),
        _of_run("events"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_events")),
    )
    op.create_index("ix_events_run_number", "events", ["run_number"])
    op.create_table(
        "metric_blocks",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("name_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["name_number"], ["metric_names.number"], name=op.f("fk_metric_blocks_name_number")),
        _of_run("metric_blocks"),
        sa.PrimaryKeyConstraint("run_number", "name_number", "attempt", "block", name=op.f("pk_metric_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metric_last",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("name_number", NUMBER, nullable=False),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=False),
        sa.Column("lowest", sa.Double(), nullable=True),
        sa.Column("highest", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["name_number"], ["metric_names.number"], name=op.f("fk_metric_last_name_number")),
        _of_run("metric_last"),
        sa.PrimaryKeyConstraint("run_number", "name_number", name=op.f("pk_metric_last")),
    )
    op.create_index("ix_metric_last_sort", "metric_last", ["name_number", "last"])
    op.create_table(
        "run_tags",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("tag", sa.String(length=60), nullable=False),
        _of_run("run_tags"),
        sa.PrimaryKeyConstraint("run_number", "tag", name=op.f("pk_run_tags")),
    )
    op.create_index("ix_run_tags_tag", "run_tags", ["tag"])
    op.create_table(
        "samples",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("prompt_id", sa.String(length=300), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("extracted", sa.Text(), nullable=True),
        sa.Column("gold", sa.Text(), nullable=False),
        sa.Column("verdict", sa.String(length=20), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("extra", JSON, nullable=False),
        _of_run("samples"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_samples")),
    )
    op.create_index("ix_samples_step", "samples", ["run_number", "step", "attempt"])


def downgrade() -> None:
    # Dropping a table drops its indexes.
    dependent = ("samples", "run_tags", "metric_last", "metric_blocks", "events", "evaluations", "attempts")
    for table in (*dependent, "runs", "tokens", "metric_names", "idempotency_keys", "groups"):
        op.drop_table(table)
