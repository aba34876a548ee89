"""Baseline schema: every table as of revision 0009, which earlier versions reached in nine steps. Names of constraints
follow the naming convention of db/tables.py.

Revision ID: 0009
Revises:
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_run(**options: Any) -> sa.Column[int]:
    return sa.Column("run_number", NUMBER, sa.ForeignKey("runs.number", ondelete="CASCADE"), **options)


def _of_metric() -> sa.Column[int]:
    return sa.Column("name_number", NUMBER, sa.ForeignKey("metric_names.number"), primary_key=True)


def upgrade() -> None:
    op.create_table(
        "alert_cursor",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("event_number", NUMBER, nullable=False),
    )
    op.create_table(
        "groups",
        sa.Column("number", NUMBER, primary_key=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", sa.String(32), primary_key=True),
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("resource_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "metric_names",
        sa.Column("number", NUMBER, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
    )
    op.create_table(
        "schedulers",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("ticked_at", sa.Double(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("lost_leases", sa.Integer(), nullable=False),
        sa.Column("claims", sa.Integer(), nullable=False),
        sa.Column("queue_wait_s", sa.Double(), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
    )
    op.create_table(
        "runs",
        sa.Column("number", NUMBER, primary_key=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("group_number", NUMBER, sa.ForeignKey("groups.number"), index=True),
        sa.Column("group_values", JSON),
        sa.Column("parent_id", sa.String(32)),
        sa.Column("parent_kind", sa.String(10)),
        sa.Column("config_sha256", sa.String(64), nullable=False, index=True),
        sa.Column("rule", sa.String(200), nullable=False),
        sa.Column("rule_label", sa.String(100), nullable=False),
        sa.Column("model", sa.String(400), nullable=False, index=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("step_budget", sa.BigInteger()),
        sa.Column("backward_passes_budget", sa.BigInteger()),
        sa.Column("tokens_budget", sa.BigInteger()),
        sa.Column("hours_budget", sa.Double()),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(100), nullable=False),
        sa.Column("created_by_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.String(40)),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("ended_by", sa.String(20)),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("lease_token", NUMBER, nullable=False),
        sa.Column("lease_expires_at", sa.Double()),
        sa.Column("launch", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("run_token_sha256", sa.String(64)),
        sa.Column("launched_at", sa.Double()),
        sa.Column("heartbeat_at", sa.Double()),
        sa.Column("phase", sa.String(200)),
        sa.Column("wish_at", sa.Double()),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("last_batch", sa.Integer(), nullable=False),
        sa.Column("offsets", JSON, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("backward_passes", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("training_s", sa.Double(), nullable=False),
        sa.Column("score", sa.Double()),
        sa.Column("score_best", sa.Double()),
        sa.Column("score_step", sa.Integer()),
        sa.Column("pruned_at", sa.Double()),
    )
    op.create_index("ix_runs_created", "runs", ["archived", "created_at", "number"])
    op.create_index("ix_runs_name", "runs", ["archived", "name", "number"])
    op.create_index("ix_runs_queue", "runs", ["state", "priority", "queued_at", "number"])
    op.create_index("ix_runs_rule", "runs", ["archived", "rule", "state", "created_at", "number"])
    op.create_index("ix_runs_score", "runs", ["archived", "score", "number"])
    op.create_index("ix_runs_score_best", "runs", ["archived", "score_best", "number"])
    op.create_index("ix_runs_state", "runs", ["archived", "state", "created_at", "number"])
    op.create_table(
        "attempts",
        _of_run(primary_key=True),
        sa.Column("attempt", sa.Integer(), primary_key=True),
        sa.Column("first_step", sa.Integer(), nullable=False),
    )
    op.create_table(
        "evaluations",
        sa.Column("number", NUMBER, primary_key=True),
        _of_run(nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("benchmark", sa.String(200), nullable=False),
        sa.Column("record", JSON, nullable=False),
    )
    op.create_index("ix_evaluations_step", "evaluations", ["run_number", "benchmark", "step"])
    op.create_table(
        "events",
        sa.Column("number", NUMBER, primary_key=True),
        _of_run(index=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(60), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("fields", JSON, nullable=False),
    )
    op.create_table(
        "metric_blocks",
        _of_run(primary_key=True),
        _of_metric(),
        sa.Column("attempt", sa.Integer(), primary_key=True),
        sa.Column("block", sa.Integer(), primary_key=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metric_last",
        _of_run(primary_key=True),
        _of_metric(),
        sa.Column("last", sa.Double()),
        sa.Column("last_step", sa.Integer(), nullable=False),
        sa.Column("lowest", sa.Double()),
        sa.Column("highest", sa.Double()),
    )
    op.create_index("ix_metric_last_sort", "metric_last", ["name_number", "last", "run_number"])
    op.create_table(
        "run_documents",
        _of_run(primary_key=True),
        sa.Column("config", JSON, nullable=False),
        sa.Column("identity", JSON),
    )
    op.create_table("run_searches", _of_run(primary_key=True), sa.Column("text", sa.Text(), nullable=False))
    op.create_table(
        "run_tags", _of_run(primary_key=True), sa.Column("tag", sa.String(60), primary_key=True, index=True)
    )
    op.create_table(
        "samples",
        sa.Column("number", NUMBER, primary_key=True),
        _of_run(nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("prompt_id", sa.String(300), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("extracted", sa.Text()),
        sa.Column("gold", sa.Text(), nullable=False),
        sa.Column("verdict", sa.String(20), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("turns", JSON),
        sa.Column("end", sa.String(20)),
        sa.Column("end_detail", sa.Text()),
        sa.Column("sampled_length", sa.Integer()),
        sa.Column("extra", JSON, nullable=False),
    )
    op.create_index("ix_samples_step", "samples", ["run_number", "step", "attempt"])
