"""A thread that notices a run whose main thread makes no progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gxpo_trainer.cluster.progress import MAIN_THREAD_GRACE_S, ProgressWatch
from gxpo_trainer.errors import Stalled

_NOTICE_S = 60.0
"""Time without progress after which it is shown with the phase."""

_PAUSED_S = 10.0
"""A poll that is this late was not late by load: the process was stopped."""


class Watchdog:
    """Calls `on_stall` once, from its own thread, when a phase exceeds its limit by `grace_s`.

    Waits for actors end at the limit by themselves and are recovered; what is left is a main thread that hangs in its
    own code, such as a write to a file server that does not answer. show_idle: called with whole minutes without
    progress (0 when there is progress again) and the phase's limit in seconds. A pause of the whole process (SIGSTOP)
    is not counted.
    """

    def __init__(
        self,
        watch: ProgressWatch,
        on_stall: Callable[[Stalled], None],
        show_idle: Callable[[int, float], None] = lambda minutes, limit_s: None,
        *,
        grace_s: float = MAIN_THREAD_GRACE_S,
        poll_s: float = 1.0,
    ) -> None:
        self._watch, self._on_stall, self._show_idle = watch, on_stall, show_idle
        self._grace_s, self._poll_s = grace_s, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._watch.progressed()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        polled, shown = time.monotonic(), 0
        while not self._stop.wait(self._poll_s):
            paused_s = time.monotonic() - polled - self._poll_s
            polled = time.monotonic()
            if paused_s > _PAUSED_S:
                self._watch.excuse(paused_s)
            if self._watch.idle_s > self._watch.limit_s + self._grace_s:
                self._on_stall(self._watch.describe())
                return
            minutes = int(self._watch.idle_s / 60) if self._watch.idle_s >= _NOTICE_S else 0
            if minutes != shown:
                shown = minutes
                self._show_idle(minutes, self._watch.limit_s)
