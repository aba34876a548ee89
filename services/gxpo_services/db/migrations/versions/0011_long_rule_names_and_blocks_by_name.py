"""Names of rules of users, and an index with which metric names that no run uses are found and deleted.

Revision ID: 0011
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0009"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite ignores lengths
        op.alter_column("runs", "rule", type_=sa.String(200))
    op.create_index("ix_metric_blocks_name_number", "metric_blocks", ["name_number"])
