"""Requests on their way into a running engine: filled by one thread, emptied by the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gxpo_trainer.rollout.requests import SampleRequest

Indexed = tuple[int, SampleRequest]


class Intake:
    """A closable queue of (index, request), and of calls for the engine's thread."""

    def __init__(self, requests: Sequence[Indexed] = (), *, closed: bool = False) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Indexed] = deque(requests)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
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
            for _, future in self._calls:
                future.cancel()
            self._calls.clear()
            self._changed.notify_all()

    def call(self, function: Callable[[], Any]) -> Any:
        """Result of a function that the engine's thread runs between two of its steps; waits for it."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the stream has ended; nothing runs in it any more")
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def post(self, function: Callable[[], None]) -> None:
        """A function that the engine's thread runs between two of its steps; no longer after an abort.

        Unlike `call` it does not wait, and it may come after `close`, which only says that no request follows.
        """
        with self._changed:
            if not self._aborted:
                self._calls.append((function, Future()))
                self._changed.notify_all()

    def run_calls(self, *, wait: bool) -> None:
        """Run the calls that have arrived; wait: block until there is one, or the stream is aborted."""
        with self._changed:
            while wait and not self._calls and not self._aborted:
                self._changed.wait()
            calls = list(self._calls)
            self._calls.clear()
        for function, future in calls:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def take(self, *, wait: bool, expect_calls: bool = False) -> list[Indexed] | None:
        """Requests that have arrived; wait: block until there is one or a call. None when closed and empty.

        expect_calls: a call is sure to come, so wait for it even when closed.
        """
        with self._changed:
            while wait and not (self._waiting or self._calls or self._aborted or (self._closed and not expect_calls)):
                self._changed.wait()
            taken = list(self._waiting)
            self._waiting.clear()
            return taken if taken or not self._closed else None
