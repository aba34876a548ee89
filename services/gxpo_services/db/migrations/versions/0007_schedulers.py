"""what each scheduler has done, for /metrics

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "schedulers",
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("ticked_at", sa.Double(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("recoveries", sa.Integer(), nullable=False),
        sa.Column("lost_leases", sa.Integer(), nullable=False),
        sa.Column("claims", sa.Integer(), nullable=False),
        sa.Column("queue_wait_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_schedulers")),
    )


def downgrade() -> None:
    op.drop_table("schedulers")
