"""add indexes for lists sorted by accuracy, and one that covers the whole order of the queue

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_QUEUE = ["state", "priority", "queued_at"]
_INDEXES = {f"ix_runs_{column}": ["archived", column, "number"] for column in ("score", "score_best")}


def upgrade() -> None:
    for name, columns in _INDEXES.items():
        op.create_index(name, "runs", columns)
    op.drop_index("ix_runs_queue", "runs")
    op.create_index("ix_runs_queue", "runs", [*_QUEUE, "number"])


def downgrade() -> None:
    op.drop_index("ix_runs_queue", "runs")
    op.create_index("ix_runs_queue", "runs", _QUEUE)
    for name in _INDEXES:
        op.drop_index(name, "runs")
