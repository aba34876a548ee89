"""Slots for responses that take long: streams, exports and comparisons. One reader cannot take those of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def holding(self, owner: str) -> Iterator[None]:
        """Count a response within the context. Raises LimitReached."""
        self.take(owner)
        try:
            yield
        finally:
            self.release(owner)

    def take(self, owner: str) -> None:
        """Count a response that is about to open. Raises LimitReached."""
        if self._open[owner] >= self._each:
            has = f"your token has {self._each} open {self._what}"
            raise LimitReached(f"{has}, which is the limit; close one or wait for its end")
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
        with self._slots.holding(self._owner):
            await super().__call__(scope, receive, send)


def slots_of(request: Request, name: str) -> Slots:
    """Slots of the application: `stream_slots`, `export_slots` or `heavy_slots`."""
    found: Slots = getattr(request.app.state, name)
    return found
