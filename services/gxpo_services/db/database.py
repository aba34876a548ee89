"""Engines and sessions of SQLite (WAL mode) and PostgreSQL.

A PostgreSQL server or network that no longer answers is an error, not an endless wait. The server ends long statements
itself (statement_timeout). One that is frozen, or whose host is, does not: its kernel still acknowledges what it is
sent. So each wait of the client has a limit as well. After one that passed it, all others fail at once for a few
seconds: requests would otherwise wait for each other's time-outs in turn.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import Format
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    InterfaceError,
    InternalError,
    InvalidatePoolError,
    OperationalError,
    TimeoutError as PoolTimeout,
)
from sqlalchemy.orm import Session, sessionmaker

UNAVAILABLE = (OperationalError, InterfaceError, InternalError)
"""InternalError: of a server that only reads, as after a failover, or that ended an idle transaction."""
INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""`INSERT … ON CONFLICT` of each database; both spell it alike."""
# LIFO: the connection used last has warm pages and prepared statements.
_POOL = {"pool_size": 10, "max_overflow": 20, "pool_use_lifo": True}
_READING_POOL = {"pool_size": 5, "max_overflow": 10}
"""Small enough for two API and two scheduler processes within the 200 connections of the cluster's PostgreSQL."""
BINARY_ROWS = "gxpo_binary_rows"
"""Execution option: PostgreSQL's binary format. As text, bytes are twice as long."""
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
_GRACE_S = 2.0
"""How much longer than the server's own limit a client waits, so that the server's error is the one that counts."""
_RETRY_S = 5.0
_UNUSED_S = 1.0
"""A connection that was not used for longer is tried first, and one whose server has sent something since, as when it
closes it. To try each, as pool_pre_ping does, is a tenth of what a busy service asks of its database."""


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time, or has not answered since another connection noticed that."""


class Server:
    """Whether a server answers, as its connections find out."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._silent_until = -math.inf
        """Until then nobody tries it."""

    def connect(self, *arguments: Any, **parameters: Any) -> _Connection:
        self.check()
        try:
            connection = _Connection.connect(*arguments, **parameters)
        except psycopg.errors.ConnectionTimeout:
            self._silent_until = time.monotonic() + _RETRY_S
            raise
        connection.server = self
        return connection

    def check(self) -> None:
        """Raise ServerSilent if the server did not answer a moment ago."""
        if time.monotonic() < self._silent_until:
            raise ServerSilent(f"the database server did not answer within {self.timeout_s:g} s")

    def wait(self, connection: _Connection, wait: Callable[[float], Any]) -> Any:
        """The result of `wait`, which gets its time limit. Closes the connection and raises ServerSilent after it."""
        limit = self.timeout_s + _GRACE_S
        begin = time.monotonic()
        try:
            self.check()
            return wait(limit)
        except psycopg.Error as error:
            now = time.monotonic()
            if now - begin < limit and not isinstance(error, ServerSilent):
                raise
            connection.close()
            if isinstance(error, ServerSilent):
                raise
            self._silent_until = now + _RETRY_S
            raise ServerSilent(f"the database server did not answer within {limit:g} s") from error


class _Connection(psycopg.Connection[Any]):
    server: Server | None = None

    def wait(self, gen: PQGen[Any], *arguments: Any, **named: Any) -> Any:
        """Everything that a connection waits for, statements, commits and rollbacks, waits here."""
        if self.server is None:
            return super().wait(gen, *arguments, **named)
        return self.server.wait(self, lambda limit: super(_Connection, self).wait(gen, timeout=limit))


def _has_input(connection: psycopg.Connection[Any]) -> bool:
    """Whether a connection that waits for nothing has something to read."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def make_engine(url: str, server: Server | None = None, **options: Any) -> Engine:
    """An engine configured for durability and concurrency.

    PostgreSQL: connections raise OperationalError when `server` does not answer in time; None: without limit.
    SQLite: WAL with synchronous=NORMAL, foreign keys, and BEGIN IMMEDIATE for write transactions: upgrading a read lock
    later could fail with `database is locked`.
    """
    parsed, options = make_url(url), _POOL | options
    if parsed.get_backend_name() == "sqlite":
        if parsed.database and parsed.database != ":memory:":
            with suppress(OSError):  # SQLite says so itself
                Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = create_engine(url, **options, connect_args={"timeout": 30, "check_same_thread": False})

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
    connecting = {name: value for name, value in _CONNECTING.items() if name not in parsed.query}
    if server is not None and "options" in connecting:
        connecting["options"] += f" -c statement_timeout={math.ceil(server.timeout_s * 1000)}"
    engine = create_engine(url, **options, connect_args=connecting)

    @event.listens_for(engine, "checkin")
    def _on_checkin(_connection: Any, record: Any) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _on_checkout(connection: Any, record: Any, _proxy: Any) -> None:
        try:
            if time.monotonic() - record.info.get("used_at", math.inf) > _UNUSED_S or _has_input(connection):
                engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise InvalidatePoolError from error

    @event.listens_for(engine, "do_connect")
    def _on_do_connect(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
        return None if server is None else server.connect(*arguments, **parameters)

    @event.listens_for(engine, "before_cursor_execute")
    def _on_execute(_connection: Any, cursor: Any, _statement: Any, _values: Any, context: Any, _many: bool) -> None:
        if context is not None and context.execution_options.get(BINARY_ROWS):
            cursor.format = Format.BINARY

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
        server = Server(timeout_s)
        self.engine = make_engine(url, server)
        # On PostgreSQL queries have their own connections in autocommit mode: a transaction costs two round trips, and
        # under READ COMMITTED every query sees the latest state anyway.
        self._reading_engine = (
            self.engine.execution_options(gxpo_read_only=True)
            if self.is_sqlite
            else make_engine(url, server, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True, **_READING_POOL)
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
            with suppress(*UNAVAILABLE, PoolTimeout), self.autocommit_connection() as connection:
                connection.exec_driver_sql("SELECT pg_notify(%s, '')", (CHANNEL,))

    @contextmanager
    def reading(self, *, one_snapshot: bool = False) -> Iterator[Session]:
        """A session for queries; changed objects raise RuntimeError.

        They see one snapshot on SQLite, and on PostgreSQL the latest state unless `one_snapshot` is asked for. Neither
        begin nor end blocks.
        """
        with self._read() as session:
            if one_snapshot and not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def autocommit_connection(self) -> Iterator[Connection]:
        """A connection for single queries, each of which sees the latest state, without the cost of a session."""
        with self._reading_engine.connect() as connection:
            yield connection

    @contextmanager
    def single_write(self) -> Iterator[Connection]:
        """A connection for one statement that changes rows, which PostgreSQL takes in one round trip."""
        if self.is_sqlite:
            with self.writing() as session:
                yield session.connection()
        else:
            with self.autocommit_connection() as connection:
                yield connection

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def close(self) -> None:
        self.engine.dispose()
        self._reading_engine.dispose()


async def listen(url: URL, channel: str) -> AsyncIterator[None]:
    """An item for each notification of a channel, and a first one once the connection listens.

    Occupies a connection and no thread. Raises psycopg.Error and OSError when the connection cannot be made or is lost;
    keep-alives notice a silent host.
    """
    _, given = url.get_dialect()().create_connect_args(url)
    connection = await psycopg.AsyncConnection.connect(**{**_CONNECTING, **given}, autocommit=True)
    try:
        await connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
        yield
        async for _ in connection.notifies():
            yield
    finally:
        # Not AsyncConnection's own context manager, which would send a statement on a connection that is lost.
        await connection.close()
