"""Engines and sessions of SQLite (WAL mode) and PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

UNAVAILABLE = (OperationalError, InterfaceError)
"""Errors of a database that cannot be reached."""
BINARY_ROWS = "gxpo_binary_rows"
"""Execution option: PostgreSQL's binary format. As text, bytes are twice as long."""
_PING_AFTER_S = 1.0
"""Idle time after which a connection is pinged at check-out; a ping before every query would cost too much."""
# LIFO: the connection used last has warm pages and prepared statements.
_POOL = {"pool_size": 10, "max_overflow": 20, "pool_use_lifo": True}
_READING_POOL = _POOL | {"pool_size": 5, "max_overflow": 10}
"""Small enough for two API and two scheduler processes within the 200 connections of the cluster's PostgreSQL."""
_CONNECTING: dict[str, Any] = {
    "connect_timeout": 10,  # s
    "keepalives": 1,
    "keepalives_idle": 10,  # s
    "keepalives_interval": 5,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms
    # A client that hangs in a transaction would keep its locks, that of the order of events too. None of ours waits for
    # anything but the database and a file in one.
    "options": "-c idle_in_transaction_session_timeout=60s",
}
"""How psycopg connects: a server or network that no longer responds is an error, not an endless wait. The URL's own
parameters take precedence."""


def make_engine(url: str) -> Engine:
    """An engine configured for durability and concurrency.

    SQLite: WAL with synchronous=NORMAL, foreign keys, and BEGIN IMMEDIATE for write transactions: upgrading a read lock
    later could fail with `database is locked`.
    """
    if make_url(url).get_backend_name() != "sqlite":
        return _postgres_engine(url)
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


def _postgres_engine(url: str, **options: Any) -> Engine:
    from psycopg.pq import Format

    given = make_url(url).query
    connecting = {name: value for name, value in _CONNECTING.items() if name not in given}
    engine = create_engine(url, **(_POOL | options), connect_args=connecting)

    @event.listens_for(engine, "checkin")
    def _on_checkin(_connection: Any, record: Any) -> None:
        record.info["used"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _on_checkout(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("used", time.monotonic()) > _PING_AFTER_S:
            _ping(engine, connection)

    @event.listens_for(engine, "before_cursor_execute")
    def _on_execute(_connection: Any, cursor: Any, _statement: Any, _values: Any, context: Any, _many: bool) -> None:
        if context is not None and context.execution_options.get(BINARY_ROWS):
            cursor.format = Format.BINARY

    return engine


def _refuse_changes(session: Session, *_: Any) -> None:
    """Reject writes: without a transaction they could not be rolled back."""
    raise RuntimeError(f"changes in a reading session: {[*session.new, *session.dirty, *session.deleted]}")


def _ping(engine: Engine, connection: Any) -> None:
    """Raise DisconnectionError for a dead connection, so that the pool replaces it."""
    try:
        alive = engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        if not engine.dialect.is_disconnect(error, connection, None):
            raise
        alive = False
    if not alive:
        raise DisconnectionError("the database server has closed this connection")


class Database:
    """Sessions on one database. `reading()` takes no write lock on SQLite."""

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        # On PostgreSQL queries have their own connections in autocommit mode: a transaction costs two round trips, and
        # under READ COMMITTED every query sees the latest state anyway.
        self._reading_engine = (
            self.engine.execution_options(gxpo_read_only=True)
            if self.is_sqlite
            else _postgres_engine(url, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True, **_READING_POOL)
        )
        self._write = sessionmaker(self.engine, expire_on_commit=False)
        self._read = sessionmaker(self._reading_engine, expire_on_commit=False)
        event.listen(self._read, "before_flush", _refuse_changes)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session in a transaction: committed at the end, rolled back on any exception."""
        with self._write.begin() as session:
            yield session

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
