"""Engines of PostgreSQL: a server or network that no longer answers is an error, not an endless wait.

The server ends long statements itself (statement_timeout). One that is frozen, or whose host is, does not: its kernel
still acknowledges what it is sent. So each wait of the client has a limit as well. After the first one that passed it,
all others fail at once, but for one every few seconds that tries whether the server answers again: requests would
otherwise wait for each other's time-outs in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import Format
from sqlalchemy import URL, Engine, create_engine, event, make_url

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
_RETRY_S = 2.0


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time, or has not answered since another connection noticed that."""


class Server:
    """Whether a server answers, as its connections find out."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self._next_try: float | None = None
        """When it may be tried again; None while it answers."""

    def connect(self, *arguments: Any, **parameters: Any) -> _Connection:
        self.check()
        try:
            connection = _Connection.connect(*arguments, **parameters)
        except psycopg.Error as error:
            self._note(silent=isinstance(error, psycopg.errors.ConnectionTimeout))
            raise
        self._note(silent=False)
        connection.server = self
        return connection

    def check(self) -> None:
        """Raise ServerSilent unless the server answers, or its next try is due; that is the caller's then."""
        if self._next_try is None:
            return
        now = self._clock()
        if now < self._next_try:
            raise ServerSilent(f"the database server did not answer within {self.timeout_s:g} s")
        self._next_try = now + self.timeout_s + _RETRY_S

    def _note(self, *, silent: bool) -> None:
        self._next_try = self._clock() + _RETRY_S if silent else None

    def wait(self, connection: _Connection, wait: Callable[[float], Any]) -> Any:
        """The result of `wait`, which gets its time limit. Closes the connection and raises ServerSilent after it."""
        limit = self.timeout_s + _GRACE_S
        try:
            self.check()
        except ServerSilent:
            connection.close()
            raise
        begin = self._clock()
        try:
            result = wait(limit)
        except psycopg.Error as error:
            silent = self._clock() - begin >= limit
            self._note(silent=silent)
            if not silent:
                raise
            connection.close()
            raise ServerSilent(f"the database server did not answer within {limit:g} s") from error
        self._note(silent=False)
        return result


class _Connection(psycopg.Connection[Any]):
    server: Server | None = None

    def wait(self, gen: PQGen[Any], *arguments: Any, **named: Any) -> Any:
        """Everything that a connection waits for, statements, commits and rollbacks, waits here."""
        if self.server is None:
            return super().wait(gen, *arguments, **named)
        return self.server.wait(self, lambda limit: super(_Connection, self).wait(gen, timeout=limit))


def make_engine(url: str, server: Server | None = None, **options: Any) -> Engine:
    """An engine whose connections raise OperationalError when `server` does not answer in time; None: without limit."""
    given = make_url(url).query
    connecting = {name: value for name, value in _CONNECTING.items() if name not in given}
    if server is not None and "options" in connecting:
        connecting["options"] += f" -c statement_timeout={math.ceil(server.timeout_s * 1000)}"
    engine = create_engine(url, **options, connect_args=connecting, pool_pre_ping=True)

    @event.listens_for(engine, "do_connect")
    def _on_connect(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
        return None if server is None else server.connect(*arguments, **parameters)

    @event.listens_for(engine, "before_cursor_execute")
    def _on_execute(_connection: Any, cursor: Any, _statement: Any, _values: Any, context: Any, _many: bool) -> None:
        if context is not None and context.execution_options.get(BINARY_ROWS):
            cursor.format = Format.BINARY

    return engine


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
