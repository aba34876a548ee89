"""Metric series of a run as they grow: the first answer whole, then increments. Pure but for the fetch it is given.

The service gives each run a `revision` that grows when its history is written anew (a run recovered from an
earlier step). A client that sees another revision than its own throws away what it has and asks for everything.
Increments are asked for from one step before the newest, because an evaluation may report on the same step later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_POINTS = 600
"""Of one series, about; twice as many before it is thinned again."""

Fetch = Callable[[int | None], Mapping[str, Any]]
FetchMany = Callable[[list[str], int | None], Mapping[str, Mapping[str, Any]]]


def number(value: Any) -> float:
    """A JSON value as a float; the API spells NaN and infinities as text. What is no number becomes NaN."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(slots=True)
class Points:
    """One metric: equal-length lists. x is the chosen axis (steps, passes, seconds or tokens)."""

    steps: list[int] = field(default_factory=list)
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """Newest value, NaN without any."""
        return self.y[-1] if self.y else math.nan

    def cut(self, step: int) -> None:
        """Forget what comes after `step`."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop(), self.x.pop(), self.y.pop()

    def extend(self, entry: Mapping[str, Any]) -> None:
        """Append an answer's points that are newer than the newest here."""
        newest = self.steps[-1] if self.steps else -1
        for step, x, y in zip(entry["steps"], entry["x"], entry["y"], strict=True):
            if step > newest:
                self.steps.append(int(step))
                self.x.append(number(x))
                self.y.append(number(y))


Series = Mapping[str, Points]


class LiveSeries:
    """The series of one run on one axis; `refresh` brings them up to date."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.max_points = max_points
        self.revision: int | None = None
        self.attempt = 0
        self.last_step = -1
        self.points: dict[str, Points] = {}

    def refresh(self, fetch: Fetch) -> None:
        """`fetch(after)` asks the service for points with a step above `after`, None for all.

        What grew past twice `max_points` is asked for anew, thinned by the service, so memory stays bounded.
        """
        after = self.overlap
        if not self.take(fetch(after), after) or (after is not None and self.overgrown):
            self.take(fetch(None), None)

    @property
    def overgrown(self) -> bool:
        return max((len(points) for points in self.points.values()), default=0) > 2 * self.max_points

    @property
    def overlap(self) -> int | None:
        """The step after which an increment is asked for: one before the newest; None before anything came."""
        return self.last_step - 1 if self.last_step >= 1 else None

    def take(self, answer: Mapping[str, Any], after: int | None) -> bool:
        """Take in an answer to a question with `after`; False when history was written anew and it is of no use."""
        if after is not None and answer["revision"] != self.revision:
            return False
        self._merge(answer, after)
        return True

    def _merge(self, answer: Mapping[str, Any], after: int | None) -> None:
        if after is None:
            self.points = {}
        else:
            for points in self.points.values():
                points.cut(after)
        for name, entry in answer["series"].items():
            self.points.setdefault(name, Points()).extend(entry)
        self.revision = answer["revision"]
        self.attempt = int(answer.get("attempt") or 0)
        self.last_step = int(answer["last_step"] if answer.get("last_step") is not None else -1)


def refresh_many(series: Mapping[str, LiveSeries], fetch: FetchMany) -> None:
    """The same for several runs with few questions: `fetch(runs, after)` gives the answers by run."""
    questions: list[tuple[list[str], int | None]] = []
    fresh = [run for run, found in series.items() if found.overlap is None]
    known = {run: found.overlap for run, found in series.items() if found.overlap is not None}
    if fresh:
        questions.append((fresh, None))
    if known:
        questions.append((list(known), min(known.values())))
    again: list[str] = []
    for runs, after in questions:
        for run, answer in fetch(runs, after).items():
            if not series[run].take(answer, after) or (after is not None and series[run].overgrown):
                again.append(run)
    if again:
        for run, answer in fetch(again, None).items():
            series[run].take(answer, None)
