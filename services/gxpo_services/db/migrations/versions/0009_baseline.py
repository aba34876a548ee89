"""Baseline schema: every table as of revision 0009, which earlier versions reached in nine steps.

Revision ID: 0009
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_run(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["run_number"], ["runs.number"], name=f"fk_{table}_run_number", ondelete="CASCADE")


def upgrade() -> None:
    op.create_table(
        "alert_cursor",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("event_number", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_alert_cursor"),
    )
    op.create_table(
        "groups",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_groups"),
        sa.UniqueConstraint("id", name="uq_groups_id"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("resource_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name="pk_idempotency_keys"),
    )
    op.create_table(
        "metric_names",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_metric_names"),
        sa.UniqueConstraint("name", name="uq_metric_names_name"),
    )
    op.create_table(
        "schedulers",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("ticked_at", sa.Double(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("lost_leases", sa.Integer(), nullable=False),
        sa.Column("claims", sa.Integer(), nullable=False),
        sa.Column("queue_wait_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_schedulers"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("sha256", name="uq_tokens_sha256"),
    )
    op.create_table(
        "runs",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("group_number", NUMBER, nullable=True),
        sa.Column("group_values", JSON, nullable=True),
        sa.Column("parent_id", sa.String(32), nullable=True),
        sa.Column("parent_kind", sa.String(10), nullable=True),
        sa.Column("config_sha256", sa.String(64), nullable=False),
        sa.Column("rule", sa.String(200), nullable=False),
        sa.Column("rule_label", sa.String(100), nullable=False),
        sa.Column("model", sa.String(400), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("step_budget", sa.BigInteger(), nullable=True),
        sa.Column("backward_passes_budget", sa.BigInteger(), nullable=True),
        sa.Column("tokens_budget", sa.BigInteger(), nullable=True),
        sa.Column("hours_budget", sa.Double(), nullable=True),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
        sa.Column("created_by_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.String(40), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("ended_by", sa.String(20), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(64), nullable=True),
        sa.Column("lease_token", NUMBER, nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("launch", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("run_token_sha256", sa.String(64), nullable=True),
        sa.Column("launched_at", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("phase", sa.String(200), nullable=True),
        sa.Column("wish_at", sa.Double(), nullable=True),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("last_batch", sa.Integer(), nullable=False),
        sa.Column("offsets", JSON, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("backward_passes", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("training_s", sa.Double(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("score_best", sa.Double(), nullable=True),
        sa.Column("score_step", sa.Integer(), nullable=True),
        sa.Column("pruned_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["group_number"], ["groups.number"], name="fk_runs_group_number"),
        sa.PrimaryKeyConstraint("number", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_index("ix_runs_config_sha256", "runs", ["config_sha256"])
    op.create_index("ix_runs_created", "runs", ["archived", "created_at", "number"])
    op.create_index("ix_runs_group_number", "runs", ["group_number"])
    op.create_index("ix_runs_model", "runs", ["model"])
    op.create_index("ix_runs_name", "runs", ["archived", "name", "number"])
    op.create_index("ix_runs_queue", "runs", ["state", "priority", "queued_at", "number"])
    op.create_index("ix_runs_rule", "runs", ["archived", "rule", "state", "created_at", "number"])
    op.create_index("ix_runs_score", "runs", ["archived", "score", "number"])
    op.create_index("ix_runs_score_best", "runs", ["archived", "score_best", "number"])
    op.create_index("ix_runs_state", "runs", ["archived", "state", "created_at", "number"])
    op.create_table(
        "attempts",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.Integer(), nullable=False),
        _of_run("attempts"),
        sa.PrimaryKeyConstraint("run_number", "attempt", name="pk_attempts"),
    )
    op.create_table(
        "evaluations",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("benchmark", sa.String(200), nullable=False),
        sa.Column("record", JSON, nullable=False),
        _of_run("evaluations"),
        sa.PrimaryKeyConstraint("number", name="pk_evaluations"),
    )
    op.create_index("ix_evaluations_step", "evaluations", ["run_number", "benchmark", "step"])
    op.create_table(
        "events",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("run_number", NUMBER, nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(60), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("fields", JSON, nullable=False),
        _of_run("events"),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    op.create_index("ix_events_run_number", "events", ["run_number"])
    op.create_table(
        "metric_blocks",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("name_number", NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["name_number"], ["metric_names.number"], name="fk_metric_blocks_name_number"),
        _of_run("metric_blocks"),
        sa.PrimaryKeyConstraint("run_number", "name_number", "attempt", "block", name="pk_metric_blocks"),
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
        sa.ForeignKeyConstraint(["name_number"], ["metric_names.number"], name="fk_metric_last_name_number"),
        _of_run("metric_last"),
        sa.PrimaryKeyConstraint("run_number", "name_number", name="pk_metric_last"),
    )
    op.create_index("ix_metric_last_sort", "metric_last", ["name_number", "last", "run_number"])
    op.create_table(
        "run_documents",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("identity", JSON, nullable=True),
        _of_run("run_documents"),
        sa.PrimaryKeyConstraint("run_number", name="pk_run_documents"),
    )
    op.create_table(
        "run_searches",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        _of_run("run_searches"),
        sa.PrimaryKeyConstraint("run_number", name="pk_run_searches"),
    )
    op.create_table(
        "run_tags",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("tag", sa.String(60), nullable=False),
        _of_run("run_tags"),
        sa.PrimaryKeyConstraint("run_number", "tag", name="pk_run_tags"),
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
        sa.Column("prompt_id", sa.String(300), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("extracted", sa.Text(), nullable=True),
        sa.Column("gold", sa.Text(), nullable=False),
        sa.Column("verdict", sa.String(20), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("turns", JSON, nullable=True),
        sa.Column("end", sa.String(20), nullable=True),
        sa.Column("end_detail", sa.Text(), nullable=True),
        sa.Column("sampled_length", sa.Integer(), nullable=True),
        sa.Column("extra", JSON, nullable=False),
        _of_run("samples"),
        sa.PrimaryKeyConstraint("number", name="pk_samples"),
    )
    op.create_index("ix_samples_step", "samples", ["run_number", "step", "attempt"])
