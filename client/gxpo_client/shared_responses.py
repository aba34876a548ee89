"""Responses that the sessions of a process share, so that equal requests are sent once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Entry:
    future: Future[Any] = field(default_factory=Future)
    ended_at: float | None = None


class SharedResponses:
    """Equal requests are sent once: one session sends, the others wait for its response or take a recent one.

    A response is used for `fresh_s` seconds and until the next change of this process. Errors are shared with those who
    wait, and not kept. Responses must not be modified.
    """

    def __init__(self, fresh_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, send: Callable[[], Any]) -> Any:
        """The response to `key`, from `send` unless there is one."""
        with self._lock:
            now = self._clock()
            ends = {name: entry.ended_at for name, entry in self._entries.items()}
            for name in [name for name, end in ends.items() if end is not None and now - end > self._fresh_s]:
                del self._entries[name]
            entry = self._entries.get(key)
            if sends := entry is None:
                entry = self._entries[key] = _Entry()
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
