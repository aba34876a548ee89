"""move configs and identities of runs to run_documents; add columns for what lists show and search

A list scans thousands of rows of runs, and the config was most of each row.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_AT_ONCE = 500
_SHOWN: tuple[tuple[str, sa.types.TypeEngine[Any]], ...] = (
    ("step_budget", sa.BigInteger()),
    ("backward_passes_budget", sa.BigInteger()),
    ("tokens_budget", sa.BigInteger()),
    ("hours_budget", sa.Double()),
)
_BUDGETS = (
    ("step_budget", "steps"),
    ("backward_passes_budget", "backward_passes"),
    ("tokens_budget", "tokens"),
)
_LARGEST = 2**63 - 1
_OLD_INDEXES = {
    "ix_runs_created": ["created_at", "number"],
    **{f"ix_runs_{name}": [name] for name in ("created_at", "created_by_id", "name", "rule", "state")},
}
_INDEXES = {
    "ix_runs_created": ["archived", "created_at", "number"],
    "ix_runs_name": ["archived", "name", "number"],
    "ix_runs_rule": ["archived", "rule", "state", "created_at", "number"],
    "ix_runs_state": ["archived", "state", "created_at", "number"],
}

_runs = sa.table(
    "runs",
    sa.column("number", NUMBER),
    sa.column("config", JSON),
    sa.column("identity", JSON),
    *(sa.column(name, sa.String()) for name in ("id", "name", "notes", "model", "rule_label", "search_text")),
    *(sa.column(name, kind) for name, kind in _SHOWN),
)
_tags = sa.table("run_tags", sa.column("run_number", NUMBER), sa.column("tag", sa.String()))
_documents = sa.table(
    "run_documents", sa.column("run_number", NUMBER), sa.column("config", JSON), sa.column("identity", JSON)
)


def upgrade() -> None:
    op.create_table(
        "run_documents",
        sa.Column("run_number", NUMBER, nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("identity", JSON, nullable=True),
        sa.ForeignKeyConstraint(
            ["run_number"], ["runs.number"], name=op.f("fk_run_documents_run_number"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_number", name=op.f("pk_run_documents")),
    )
    _add_filled("rule_label", sa.String(length=100), "")
    for name, kind in _SHOWN:
        op.add_column("runs", sa.Column(name, kind, nullable=True))
    _add_filled("search_text", sa.Text(), "")
    _fill()
    # Not in batch mode: it recreates the table, and dropping the old one would cascade to dependent rows.
    op.drop_column("runs", "config")
    op.drop_column("runs", "identity")
    _replace_indexes(_OLD_INDEXES, _INDEXES)
    op.drop_index("ix_metric_last_sort", "metric_last")
    op.create_index("ix_metric_last_sort", "metric_last", ["name_number", "last", "run_number"])


def _fill() -> None:
    connection = op.get_bind()
    names = ("rule_label", "search_text", *(name for name, _ in _SHOWN))
    change = sa.update(_runs).where(_runs.c.number == sa.bindparam("of_run"))
    change = change.values({name: sa.bindparam(f"new_{name}") for name in names})
    columns = [_runs.c[name] for name in ("number", "id", "name", "notes", "model", "config", "identity")]
    for rows in _parts(sa.select(*columns), _runs.c.number):
        documents = [{"run_number": row.number, "config": row.config, "identity": row.identity} for row in rows]
        connection.execute(sa.insert(_documents), documents)
        tags: dict[int, list[str]] = {row.number: [] for row in rows}
        query = sa.select(_tags).where(_tags.c.run_number.in_(tags)).order_by(_tags.c.tag)
        for number, tag in connection.execute(query):
            tags[number].append(tag)
        connection.execute(change, [_shown(row.config) | _found(row, tags[row.number]) for row in rows])


def downgrade() -> None:
    _replace_indexes(_INDEXES, _OLD_INDEXES)
    _add_filled("config", JSON, "{}")
    op.add_column("runs", sa.Column("identity", JSON, nullable=True))
    connection = op.get_bind()
    change = sa.update(_runs).where(_runs.c.number == sa.bindparam("of_run"))
    change = change.values(config=sa.bindparam("new_config"), identity=sa.bindparam("new_identity"))
    for rows in _parts(sa.select(_documents), _documents.c.run_number):
        values = [{"of_run": row.run_number, "new_config": row.config, "new_identity": row.identity} for row in rows]
        connection.execute(change, values)
    op.drop_table("run_documents")
    for name in ("rule_label", "search_text", *(name for name, _ in _SHOWN)):
        op.drop_column("runs", name)
    op.drop_index("ix_metric_last_sort", "metric_last")
    op.create_index("ix_metric_last_sort", "metric_last", ["name_number", "last"])


def _replace_indexes(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> None:
    for name in old:
        op.drop_index(name, "runs")
    for name, columns in new.items():
        op.create_index(name, "runs", columns)


def _add_filled(name: str, kind: sa.types.TypeEngine[Any], filling: str) -> None:
    """Add a NOT NULL column to a table with rows. SQLite keeps `filling` as an unused default."""
    op.add_column("runs", sa.Column(name, kind, nullable=False, server_default=filling))
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("runs", name, server_default=None)


def _parts(query: sa.Select[Any], number: sa.ColumnElement[int]) -> Iterator[list[sa.Row[Any]]]:
    """Rows in order of their numbers, in chunks: together they may not fit into memory."""
    last = 0
    while rows := list(op.get_bind().execute(query.where(number > last).order_by(number).limit(_AT_ONCE))):
        yield rows
        last = rows[-1][0]


def _found(row: sa.Row[Any], tags: list[str]) -> dict[str, Any]:
    """The searchable text, as built by the version of this migration."""
    text = "\n".join([row.name, row.notes, row.id, row.model, *tags])
    return {"of_run": row.number, "new_search_text": text.casefold()}


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that lists show, likewise."""
    rule, budget = config["learner"]["rule"], config["budget"]
    parts = [str(rule["name"]).upper()]
    if rule.get("k") is not None:
        parts.append(f"K={rule['k']}")
    if rule.get("predictor", "gradient") != "gradient":
        parts.append(str(rule["predictor"]))
    if rule.get("probes", 2) == 1:
        parts.append("1 probe")
    return {
        "new_rule_label": " ".join(parts),
        **{f"new_{shown}": _fitting(budget[name]) for shown, name in _BUDGETS},
        "new_hours_budget": None if budget["hours"] is None else float(budget["hours"]),  # "Infinity", too
    }


def _fitting(bound: int | None) -> int | None:
    """Clamp to the column's range: JSON stored integers of any size."""
    return None if bound is None else min(bound, _LARGEST)
