"""Engines of PostgreSQL: a server or network that no longer answers is an error, not an endless wait.

The server ends long statements itself (statement_timeout). One that is frozen, or whose host is, does not: its kernel
still acknowledges what it is sent. So each wait of the client has a limit as well. After one that passed it, all others
fail at once for a few seconds: requests would otherwise wait for each other's time-outs in turn.
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
_RETRY_S = 5.0


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
