"""Slots for responses that last: log streams, event streams and exports. One reader cannot take those of all."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gxpo_services.api.errors import LimitReached


class Slots:
    """Counts the open responses of one kind, by token. Used by the event loop's thread only.

    total: of all tokens together. each: of one token.
    """

    def __init__(self, what: str, total: int, each: int) -> None:
        self._what, self._total, self._each = what, total, each
        self._open: Counter[str] = Counter()

    def take(self, owner: str) -> None:
        """Count a response that is about to open. Raises LimitReached."""
        if self._open[owner] >= self._each:
            raise LimitReached(f"your token has {self._each} open {self._what}, which is the limit; close one first")
        if self._open.total() >= self._total:
            raise LimitReached(f"the service has {self._total} open {self._what}, which is the limit; try again later")
        self._open[owner] += 1

    def release(self, owner: str) -> None:
        self._open[owner] -= 1
        self._open += Counter()  # forget those without any


class SlottedResponse(StreamingResponse):
    """A stream that holds a slot from its first to its last byte, or until its client is gone.

    Without a free slot the response is the problem LimitReached.
    """

    def __init__(self, slots: Slots, owner: str, content: Any, **options: Any) -> None:
        super().__init__(content, **options)
        self._slots, self._owner = slots, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._slots.take(self._owner)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.release(self._owner)


def slots_of(request: Request, name: str) -> Slots:
    """Slots of the application: `stream_slots` or `export_slots`."""
    found: Slots = getattr(request.app.state, name)
    return found
