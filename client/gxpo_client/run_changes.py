"""The service's stream of changes, followed in a thread for as long as somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import closing, suppress
from typing import Any

from gxpo_client.errors import ServiceError

Stream = Generator[tuple[str, dict[str, Any]] | None, None, None]
Mark = tuple[int, int]
"""Number of the connection, and of a change in it."""

RETRY_S = 10.0
IDLE_S = 60.0
"""Time without a question after which the connection is closed."""


class RunChanges:
    """Tells whether a run has changed, without a request for each question."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._connections = 0
        self._is_live = False
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._retry_at = 0.0
        self._number = 0
        self._last: dict[str, int] = {}

    def follow(self, connect: Callable[[], Stream]) -> None:
        """Follow the stream from now on, unless it is followed already. An unavailable service is tried again at a
        later call. connect: as `Client.changes`, for all runs."""
        with self._lock:
            now = self._asked_at = self._clock()
            if self._thread is not None or now < self._retry_at:
                return
            self._thread = threading.Thread(target=self._follow, args=(connect,), name="run-changes", daemon=True)
            self._thread.start()

    def mark(self, runs: Collection[str]) -> Mark | None:
        """The last change of these runs, or of any run if there are none; None while the stream is not connected.

        While two marks are equal, nothing has changed between them.
        """
        with self._lock:
            if not self._is_live:
                return None
            last = max(self._last.get(run, 0) for run in runs) if runs else self._number
            return self._connections, last

    def _follow(self, connect: Callable[[], Stream]) -> None:
        try:
            # A service that does not answer, has no stream or refuses one: the questions are asked by requests.
            with suppress(ServiceError), closing(connect()) as stream:
                for change in stream:
                    if not self._note(change):
                        return
        finally:
            with self._lock:
                self._is_live, self._thread = False, None
                self._retry_at = self._clock() + RETRY_S

    def _note(self, change: tuple[str, dict[str, Any]] | None) -> bool:
        """Take in a change, or a sign of life; returns whether somebody still asks."""
        with self._lock:
            if not self._is_live:
                self._is_live, self._number, self._last = True, 0, {}
                self._connections += 1
            if change is not None:
                kind, data = change
                self._number += 1
                self._last[data["run"] if kind == "event" else data["id"]] = self._number
            return self._clock() - self._asked_at <= IDLE_S
