"""How Alembic reaches the database. On PostgreSQL an advisory lock lets one migration run at a time; SQLite's
transactions are exclusive by themselves (db/database.py)."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from gxpo_services.db.database import make_engine
from gxpo_services.db.tables import metadata

_LOCK = 0x6778706F  # "gxpo"


def run() -> None:
    engine = make_engine(context.config.attributes["url"])
    try:
        with engine.connect() as connection:
            postgres = connection.dialect.name == "postgresql"
            context.configure(
                connection=connection,
                target_metadata=metadata,
                render_as_batch=not postgres,
                compare_type=True,
                transaction_per_migration=False,
            )
            with context.begin_transaction():
                if postgres:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                context.run_migrations()
    finally:
        engine.dispose()


run()
