"""SQLite uses the number of a deleted run or group never again, as PostgreSQL does.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for table in ("groups", "runs"):
            with op.batch_alter_table(table, recreate="always", table_kwargs={"sqlite_autoincrement": True}):
                pass
