"""Names of rules of users, which may be `package.module:Class`.

SQLite ignores lengths.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("runs", "rule", type_=sa.String(200))
