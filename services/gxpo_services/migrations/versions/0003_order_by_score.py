"""indexes for the list ordered by accuracy

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_INDEXES = {f"ix_runs_{column}": ["archived", column, "number"] for column in ("score", "score_best")}


def upgrade() -> None:
    for name, columns in _INDEXES.items():
        op.create_index(name, "runs", columns)


def downgrade() -> None:
    for name in _INDEXES:
        op.drop_index(name, "runs")
