"""Responses that the sessions of a process share while the service's stream of changes reports nothing new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from gxpo_client.errors import ServiceError

Stream = Generator[tuple[str, dict[str, Any]] | None, None, None]
Mark = tuple[int, int]
"""Number of the connection, and of a change in it."""

RETRY_S = 10.0
IDLE_S = 60.0
"""Time without a call of `follow` after which the connection is closed."""


class RunChanges:
    """Whether a run has changed, from the service's stream of changes instead of a request each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._connections = 0
        self._is_live = False
        self._thread: threading.Thread | None = None
        self._used_at = 0.0
        self._retry_at = 0.0
        self._number = 0
        self._last: dict[str, int] = {}

    def follow(self, connect: Callable[[], Stream]) -> None:
        """Follow the stream from now on, unless it is followed already. An unavailable service is tried again at a
        later call. connect: as `Client.changes`, for all runs."""
        with self._lock:
            now = self._used_at = self._clock()
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
            # Without a stream there are no marks, and responses are shared for `fresh_s` only.
            with suppress(ServiceError), closing(connect()) as stream:
                for change in stream:
                    if not self._note(change):
                        return
        finally:
            with self._lock:
                self._is_live, self._thread = False, None
                self._retry_at = self._clock() + RETRY_S

    def _note(self, change: tuple[str, dict[str, Any]] | None) -> bool:
        """Record a change or a heartbeat (None); returns whether the stream is still needed."""
        with self._lock:
            if not self._is_live:
                self._is_live, self._number, self._last = True, 0, {}
                self._connections += 1
            if change is not None:
                kind, data = change
                self._number += 1
                self._last[data["run"] if kind == "event" else data["id"]] = self._number
            return self._clock() - self._used_at <= IDLE_S


_LONGEST_S = 10.0
"""Longest use of a response while no change is reported: the stream leaves out new names of ended runs, and
rows that arrive after those of their step."""


@dataclass(slots=True)
class _Entry:
    runs: Collection[str] | None
    mark: Mark | None
    future: Future[Any] = field(default_factory=Future)
    ended_at: float | None = None


class SharedResponses:
    """Equal requests are sent once: one session sends, the others wait for its response or take a recent one.

    A response is used for `fresh_s` seconds and until the next change of this process. With `changes` it is also used
    while the service's stream says that its runs have not changed. Errors are shared with those who wait, and not kept.
    Responses must not be modified.
    """

    def __init__(
        self, fresh_s: float = 1.0, clock: Callable[[], float] = time.monotonic, *, changes: RunChanges | None = None
    ) -> None:
        self._fresh_s, self._clock, self._changes = fresh_s, clock, changes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}

    def follow(self, connect: Callable[[], Stream]) -> None:
        """Follow the stream of changes if this was made with `changes`."""
        if self._changes is not None:
            self._changes.follow(connect)

    def get(self, key: Hashable, send: Callable[[], Any], runs: Collection[str] | None = None) -> Any:
        """The response to `key`, from `send` unless there is one.

        runs: ids of the runs that the response is about, none for all; None for one that the stream does not cover.
        """
        with self._lock:
            self._forget_old()
            entry = self._entries.get(key)
            if sends := entry is None:
                entry = self._entries[key] = _Entry(runs, self._mark(runs))
        assert entry is not None
        if not sends:
            return entry.future.result()
        try:
            answer = send()
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.future.set_exception(error)
            raise
        entry.ended_at = self._clock()
        entry.future.set_result(answer)
        return answer

    def clear(self) -> None:
        """Forget everything, after a change. Requests that are under way may predate it and are not reused either."""
        with self._lock:
            self._entries.clear()

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if self._is_old(entry, now)]:
            del self._entries[key]

    def _is_old(self, entry: _Entry, now: float) -> bool:
        if entry.ended_at is None or now - entry.ended_at <= self._fresh_s:
            return False
        unchanged = entry.mark is not None and entry.mark == self._mark(entry.runs)
        return not unchanged or now - entry.ended_at > _LONGEST_S

    def _mark(self, runs: Collection[str] | None) -> Mark | None:
        return None if runs is None or self._changes is None else self._changes.mark(runs)
