"""The time of a pause or cancel request under its plain name. The column that had it is dropped by a later version.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("runs", sa.Column("requested_at", sa.Float()))
    op.execute("UPDATE runs SET requested_at = wish_at")
