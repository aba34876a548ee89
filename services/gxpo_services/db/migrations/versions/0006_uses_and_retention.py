"""when a token was last used, and when retention deleted samples and log of a run

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_COLUMNS = {"tokens": "last_used_at", "runs": "pruned_at"}


def upgrade() -> None:
    for table, column in _COLUMNS.items():
        op.add_column(table, sa.Column(column, sa.Double(), nullable=True))


def downgrade() -> None:
    for table, column in _COLUMNS.items():
        op.drop_column(table, column)
