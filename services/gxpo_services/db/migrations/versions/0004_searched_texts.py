"""move the searchable text of runs to run_searches, whose rows are a tenth as wide

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_runs = sa.table("runs", sa.column("number", NUMBER), sa.column("search_text", sa.Text()))
_searches = sa.table("run_searches", sa.column("run_number", NUMBER), sa.column("text", sa.Text()))


def upgrade() -> None:
    op.create_table(
        "run_searches",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_number"], ["runs.number"], name=op.f("fk_run_searches_run_number"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_number", name=op.f("pk_run_searches")),
    )
    texts = sa.select(_runs.c.number, _runs.c.search_text)
    op.execute(sa.insert(_searches).from_select(["run_number", "text"], texts))
    op.drop_column("runs", "search_text")


def downgrade() -> None:
    op.add_column("runs", sa.Column("search_text", sa.Text(), nullable=False, server_default=""))
    text = sa.select(_searches.c.text).where(_searches.c.run_number == _runs.c.number).scalar_subquery()
    op.execute(sa.update(_runs).values(search_text=text))
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("runs", "search_text", server_default=None)
    op.drop_table("run_searches")
