"""Connections of the API: uvicorn's protocol with bounds on what a client may hold without sending or reading anything.

A connection costs a descriptor, and a process that has none left answers nobody. So the head of a request has a
time-out, a response that its client does not read is ended, and beyond the limit a new connection replaces the one that
has been without a request for longest: a client that sends its request at once is answered.
"""

from __future__ import annotations

import asyncio
import functools
import http
import resource
import sys
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from gxpo_services.api.errors import BadRequest, HeadTooLarge, Problem, TooSlow, Unavailable, problem_response

MOST_CONNECTIONS = 2000
RESERVED_DESCRIPTORS = 640
"""Of files and databases: 8 downloads of 64 files, 46 database connections, and what the process itself has open."""
UNREAD_S = 60.0
"""Time in which a client must read on; it can continue a download and a stream later."""
_MOST_DESCRIPTORS = 65_536
_LARGEST_HEAD = 65_536


class Connection(H11Protocol):
    """A connection with limits.

    head_s: time in which the head of a request must arrive. most: connections at a time. idle: those without a request,
    the longest first, with the time-out of a head that has begun; shared by the connections of a server.
    """

    def __init__(
        self, *given: Any, head_s: float, most: int, idle: dict[Connection, asyncio.TimerHandle | None], **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self._head_s, self._most, self._idle = head_s, most, idle
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            longest = next(iter(self._idle), None)
            if longest is None:
                self._refuse(Unavailable, f"the service has {self._most} connections, which is its limit; try again")
                return
            longest._stop_idling()
            longest.transport.abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idling()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_idling()

    def on_response_complete(self) -> None:
        self._idle.setdefault(self)  # with uvicorn's time-out until the next head begins
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP request, while uvicorn handles h11's error."""
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            self._refuse(HeadTooLarge, f"address and headers are longer than {_LARGEST_HEAD} bytes; shorten them")
        else:
            self._refuse(BadRequest, "this is no valid HTTP request")

    def _await_head(self) -> None:
        if self._idle.get(self) is None and not self.transport.is_closing():
            self._idle[self] = self.loop.call_later(self._head_s, self._head_is_late)

    def _stop_idling(self) -> None:
        timer = self._idle.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _head_is_late(self) -> None:
        self._stop_idling()
        self._refuse(TooSlow, f"the head of the request did not arrive within {self._head_s:g} s; send it again")

    def _refuse(self, kind: type[Problem], detail: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = problem_response(kind, detail)
            headers = [*problem.raw_headers, (b"cache-control", b"no-store"), (b"connection", b"close")]
            reason = http.HTTPStatus(kind.status).phrase.encode()
            response = h11.Response(status_code=kind.status, headers=headers, reason=reason)
            for event in (response, h11.Data(data=bytes(problem.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def most_connections() -> int:
    """Connections that this process has descriptors for."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def server_config(app: Any, head_s: float, **options: Any) -> Config:
    """How uvicorn serves an application with these limits."""
    protocol: Any = functools.partial(Connection, head_s=head_s, most=most_connections(), idle={})
    return Config(
        app,
        # Not the one that happens to be installed: parsers differ in what they accept.
        http=protocol,
        h11_max_incomplete_event_size=_LARGEST_HEAD,
        # Longer than clients keep an idle connection (httpx: 5 s), else a request may meet the closing one.
        timeout_keep_alive=20,
        backlog=128,  # also how many connections asyncio accepts before it looks at any
        # The application logs requests itself. Open streams must not delay the shutdown.
        access_log=False,
        **options,
    )
