"""An index of metric blocks by name, with which names that no run uses are found and deleted.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_index("ix_metric_blocks_name_number", "metric_blocks", ["name_number"])
