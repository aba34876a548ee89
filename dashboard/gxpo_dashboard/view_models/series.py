"""Incrementally refreshed metric series of a run. Pure, apart from the given fetch function.

The `revision` of a run increases when its history is rewritten (recovery from an earlier step); a client that sees a
new revision discards its data and requests everything. Increments start one step before the latest one, because an
evaluation may report on the same step later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_POINTS = 600
"""Approximate points per series; up to twice as many before it is requested again, thinned."""
BANDS, EVEN = "means in a band of minima and maxima", "evenly spaced steps"
"""Which points of a long series are left."""
NEVER_SMOOTHED = ("eval/", "gate/", "update/backward_passes")
"""Prefixes of metrics that the service leaves as they are."""

Fetch = Callable[[list[str], int | None], Mapping[str, Mapping[str, Any]]]
"""The responses of runs, by run, with the points after a step, or all for None."""
Bucket = tuple[int, float, float, float, float]
"""Step, x, y, low and high."""


def number(value: Any) -> float:
    """A JSON value as a float; NaN and infinities are strings in the API. Other values become NaN."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(slots=True)
class Points:
    """A metric as equal-length lists. x: steps, backward passes, seconds or tokens. thinned: what is drawn of a long
    series, empty for all its points. smoothing: weight of the average that they are, 0 for measured ones. band: of a
    thinned one the buckets (step, x, mean, low, high); the points are then its minima and maxima, and those added
    later."""

    steps: list[int] = field(default_factory=list)
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    thinned: str = ""
    smoothing: float = 0.0
    band: list[Bucket] = field(default_factory=list)
    _complete: int = -1
    """The last step in the band."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """Last value, NaN if empty."""
        return self.y[-1] if self.y else math.nan

    @property
    def drawn(self) -> list[Bucket]:
        """The line and its band: the buckets, then the points that are newer, which have no bounds."""
        points = zip(self.steps, self.x, self.y, strict=True)
        return [*self.band, *((*point, math.nan, math.nan) for point in points if point[0] > self._complete)]

    def without(self, steps: int, x: str) -> Points:
        """The points with so many fewer steps, also on the axis `step`."""
        if not steps:
            return self
        less = steps if x == "step" else 0
        points = replace(self, steps=[step - steps for step in self.steps], x=[at - less for at in self.x])
        points.band = [(step - steps, at - less, mean, low, high) for step, at, mean, low, high in self.band]
        points._complete -= steps
        return points

    def extend(self, entry: Mapping[str, Any], after: int = -1) -> None:
        """Replace the points after a step by those of a response."""
        kept = bisect_right(self.steps, after)
        self.steps[kept:] = map(int, entry["steps"])
        self.x[kept:] = map(number, entry["x"])
        self.y[kept:] = map(number, entry["y"])
        if band := entry.get("band"):
            columns = (map(number, band[name]) for name in ("x", "mean", "low", "high"))
            self.band = list(zip(band["steps"], *columns, strict=True))
            self._complete = self.steps[-1]


Series = Mapping[str, Points]


Totals = Mapping[str, tuple[float, int]]
"""Sum of a metric's finite values over all steps, and their number; thinning does not change them."""


class LiveSeries:
    """The series of one run on one axis; `refresh` below brings them up to date.

    joined: whether the service thins them to the same steps, and sends their totals. smoothing: weight of the average
    that the service is asked for.
    """

    def __init__(self, max_points: int = MAX_POINTS, *, joined: bool = False, smoothing: float = 0.0) -> None:
        self.max_points = max_points
        self.joined = joined
        self.smoothing = smoothing
        self.revision: int | None = None
        self.last_step = -1
        self.points: dict[str, Points] = {}
        self.totals: dict[str, tuple[float, int]] = {}

    @property
    def overlap(self) -> int | None:
        """The `after` of the next increment: one step before the latest; None without data."""
        return self.last_step - 1 if self.last_step >= 1 else None

    def take(self, response: Mapping[str, Any], after: int | None) -> bool:
        """Merge the response to a request with `after`.

        False when everything must be requested again: its revision does not match, the increment is itself thinned, or
        a series is longer than twice `max_points`, which the service then thins.
        """
        if after is None:
            self.points = {}
        elif response["revision"] != self.revision or any(e.get("band") for e in response["series"].values()):
            return False
        for name, entry in response["series"].items():
            smoothing = 0.0 if name.startswith(NEVER_SMOOTHED) else self.smoothing
            points = self.points.setdefault(name, Points(smoothing=smoothing))
            points.extend(entry, -1 if after is None else after)
            if entry.get("downsampled"):
                points.thinned = EVEN if self.joined else BANDS
            if self.joined:
                self.totals[name] = (number(entry["sum"]), int(entry["count"]))
        self.revision = response["revision"]
        self.last_step = int(response["last_step"] if response.get("last_step") is not None else -1)
        return after is None or all(len(points) <= 2 * self.max_points for points in self.points.values())


def refresh(series: Mapping[str, LiveSeries], fetch: Fetch) -> None:
    """Refresh runs with few requests."""
    fresh = [run for run, live in series.items() if live.overlap is None]
    known = {run: live.overlap for run, live in series.items() if live.overlap is not None}
    requests = ((fresh, None), (list(known), min(known.values(), default=None)))
    stale = [
        run
        for runs, after in requests
        if runs
        for run, response in fetch(runs, after).items()
        if not series[run].take(response, after)
    ]
    if stale:
        for run, response in fetch(stale, None).items():
            series[run].take(response, None)
