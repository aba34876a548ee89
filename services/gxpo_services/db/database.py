"""Engines and sessions of SQLite (WAL mode) and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from gxpo_services.db import postgres

UNAVAILABLE = (OperationalError, InterfaceError)
INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""`INSERT … ON CONFLICT` of each database; both spell it alike."""
# LIFO: the connection used last has warm pages and prepared statements.
_POOL = {"pool_size": 10, "max_overflow": 20, "pool_use_lifo": True}
_READING_POOL = _POOL | {"pool_size": 5, "max_overflow": 10}
"""Small enough for two API and two scheduler processes within the 200 connections of the cluster's PostgreSQL."""


def make_engine(url: str, server: postgres.Server | None = None) -> Engine:
    """An engine configured for durability and concurrency.

    PostgreSQL: db/postgres.py.
    SQLite: WAL with synchronous=NORMAL, foreign keys, and BEGIN IMMEDIATE for write transactions: upgrading a read lock
    later could fail with `database is locked`.
    """
    if make_url(url).get_backend_name() != "sqlite":
        return postgres.make_engine(url, server, **_POOL)
    path = make_url(url).database
    if path and path != ":memory:":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, **_POOL, connect_args={"timeout": 30, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # disable the driver's own transactions
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "cache_size=-65536"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        reading = connection.get_execution_options().get("gxpo_read_only", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine


_CHANGED = "gxpo_changed"
"""Key in Session.info: present if a transaction changes what streams show."""
CHANNEL = "gxpo_changes"


def note_change(session: Session) -> None:
    """Tell the streams of all processes after the commit that a run has changed or has a new event.

    Only what streams of changes show counts, so not a heartbeat alone. A change that is not noted is found later, when
    the streams compare all runs.
    """
    session.info[_CHANGED] = True


def _refuse_changes(session: Session, *_: Any) -> None:
    """Reject writes: without a transaction they could not be rolled back."""
    raise RuntimeError(f"changes in a reading session: {[*session.new, *session.dirty, *session.deleted]}")


class Database:
    """Sessions on one database. `reading()` takes no write lock on SQLite."""

    def __init__(self, url: str, timeout_s: float = 15.0) -> None:
        """timeout_s: time in which PostgreSQL must answer; SQLite waits for a lock for 30 s."""
        server = postgres.Server(timeout_s)
        self.engine = make_engine(url, server)
        # On PostgreSQL queries have their own connections in autocommit mode: a transaction costs two round trips, and
        # under READ COMMITTED every query sees the latest state anyway.
        self._reading_engine = (
            self.engine.execution_options(gxpo_read_only=True)
            if self.is_sqlite
            else postgres.make_engine(
                url, server, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True, **_READING_POOL
            )
        )
        self._write = sessionmaker(self.engine, expire_on_commit=False)
        self._read = sessionmaker(self._reading_engine, expire_on_commit=False)
        event.listen(self._read, "before_flush", _refuse_changes)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session in a transaction: committed at the end, rolled back on any exception."""
        with self._write.begin() as session:
            yield session
        if session.info.pop(_CHANGED, False) and not self.is_sqlite:
            # Within a transaction NOTIFY holds a lock of the whole server until the commit is on disk, so commits would
            # wait for each other. One that is lost, as in a crash, only delays the streams.
            with suppress(*UNAVAILABLE), self.autocommit_connection() as connection:
                connection.exec_driver_sql("SELECT pg_notify(%s, '')", (CHANNEL,))

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for queries; changed objects raise RuntimeError.

        They see one snapshot on SQLite and the latest state on PostgreSQL. Neither begin nor end blocks.
        """
        with self._read() as session:
            yield session

    @contextmanager
    def autocommit_connection(self) -> Iterator[Connection]:
        """A connection for single queries, each of which sees the latest state, without the cost of a session."""
        with self._reading_engine.connect() as connection:
            yield connection

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def close(self) -> None:
        self.engine.dispose()
        self._reading_engine.dispose()
