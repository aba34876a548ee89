"""What each process of a run did, and when: spans recorded by the controlling process.

A process has one activity at a time, or none: then it is idle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Activity = Literal["sampling", "verifying", "updating", "syncing", "saving", "evaluating"]


class Span(NamedTuple):
    """begin, end: seconds of the timeline's clock."""

    process: str
    activity: Activity
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Timeline:
    """Records activities as they change; `cut` returns those of a window and forgets what lies before it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.now = clock
        self._current: dict[str, tuple[Activity, float]] = {}
        self._spans: list[Span] = []

    def enter(self, process: str, activity: Activity | None) -> None:
        """The process begins this activity, in place of the one before; None: it becomes idle."""
        current = self._current.get(process)
        if current is not None:
            if current[0] == activity:
                return
            self._spans.append(Span(process, *current, self.now()))
            del self._current[process]
        if activity is not None:
            self._current[process] = activity, self.now()

    @contextmanager
    def during(self, process: str, activity: Activity) -> Iterator[None]:
        """Enter the activity for the duration of the block."""
        self.enter(process, activity)
        try:
            yield
        finally:
            self.enter(process, None)

    def cut(self, begin: float) -> list[Span]:
        """All spans since `begin`, clipped to it, in the order of their processes and times; forgets earlier ones."""
        end = self.now()
        open_spans = [Span(process, *current, end) for process, current in self._current.items()]
        self._spans = [span for span in self._spans if span.end > begin]
        clipped = [span._replace(begin=max(begin, span.begin)) for span in [*self._spans, *open_spans]]
        return sorted(span for span in clipped if span.begin < span.end)


def overlap_fraction(spans: Iterable[Span], first: Activity, second: Activity) -> float | None:
    """Time in which some process does `first` while some does `second`, as a share of the shorter of the two.

    1: the shorter is hidden behind the longer. None when one of them does not occur.
    """
    changes = sorted(
        change
        for span in spans
        if span.activity in (first, second)
        for change in ((span.begin, span.activity, 1), (span.end, span.activity, -1))
    )
    running, totals, both, since = Counter[str](), Counter[str](), 0.0, 0.0
    for moment, activity, change in changes:
        active = [name for name in (first, second) if running[name]]
        totals.update(dict.fromkeys(active, moment - since))
        both += moment - since if len(active) == 2 else 0.0
        running[activity] += change
        since = moment
    shorter = min(totals[first], totals[second])
    return both / shorter if shorter else None
