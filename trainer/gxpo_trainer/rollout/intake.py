"""Requests on their way into a running engine: filled by one thread, emptied by the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from gxpo_trainer.rollout.requests import SampleRequest

Indexed = tuple[int, SampleRequest]


class Intake:
    """A closable queue of (index, request)."""

    def __init__(self, requests: Sequence[Indexed] = (), *, closed: bool = False) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Indexed] = deque(requests)
        self._closed, self._aborted = closed, False

    @property
    def aborted(self) -> bool:
        return self._aborted

    def put(self, requests: Sequence[Indexed]) -> None:
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify_all()

    def close(self) -> None:
        """No request follows; the stream ends when those that came are finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Drop all requests, including those that are running."""
        with self._changed:
            self._aborted = self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def take(self, *, wait: bool) -> list[Indexed] | None:
        """Requests that have arrived; wait: block until there are some. None when closed and empty."""
        with self._changed:
            while wait and not self._waiting and not self._closed:
                self._changed.wait()
            taken = list(self._waiting)
            self._waiting.clear()
            return taken if taken or not self._closed else None
