"""how far alerts have been sent

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gxpo_services.db.tables import Number

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alert_cursor",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("event_number", Number, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_alert_cursor")),
    )


def downgrade() -> None:
    op.drop_table("alert_cursor")
