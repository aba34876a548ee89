"""turns of a response in an environment

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("turns", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=True))
    op.add_column("samples", sa.Column("end", sa.String(20), nullable=True))
    op.add_column("samples", sa.Column("end_detail", sa.Text(), nullable=True))
    op.add_column("samples", sa.Column("sampled_length", sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in ("sampled_length", "end_detail", "end", "turns"):
        op.drop_column("samples", name)
