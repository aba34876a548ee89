"""what the trainer of a run is doing

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("phase", sa.String(200), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "phase")
