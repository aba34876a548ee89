"""How Alembic reaches the database. On PostgreSQL an advisory lock lets one migration run at a time; SQLite's
transactions are exclusive by themselves (db/database.py).

An empty database gets the tables of db/tables.py and the newest revision; the migrations are for older ones.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import event, inspect, text

from gxpo_services.db.database import make_engine
from gxpo_services.db.tables import metadata
from gxpo_trainer.errors import ConfigError

_LOCK = 0x6778706F  # "gxpo"


def run() -> None:
    engine = make_engine(context.config.attributes["url"])
    if engine.dialect.name == "sqlite":
        # Rebuilding a table drops it, which would delete the rows that refer to it. Not possible
        # within a transaction.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=OFF"))
    try:
        with engine.begin() as connection:
            postgres = connection.dialect.name == "postgresql"
            context.configure(
                connection=connection,
                target_metadata=metadata,
                render_as_batch=not postgres,
                compare_type=postgres,  # SQLite ignores lengths, and keeps the older ones
            )
            if postgres:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            migrations = context.get_context()
            if migrations.get_current_revision() is None:
                if not postgres and inspect(connection).get_table_names():  # a server's database may well be shared
                    fix = "name another database by GXPO_DATABASE_URL"
                    raise ConfigError(f"{engine.url.database} has tables of another program; {fix}")
                metadata.create_all(connection)
                migrations.stamp(context.script, "head")
            context.run_migrations()
    finally:
        engine.dispose()


run()
