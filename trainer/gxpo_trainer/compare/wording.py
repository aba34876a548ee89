"""Figures of comparisons as text: percentages, differences, durations and ratios. Pure.

The client formats the figures of single runs; a test holds that both write a duration alike.
"""

from __future__ import annotations

import math

from gxpo_trainer.compare.curves import Axis
from gxpo_trainer.compare.intervals import Interval

UNKNOWN = "–"
_COMPARED: dict[Axis, tuple[str, str]] = {
    "steps": ("fewer", "steps"),
    "backward_passes": ("fewer", "backward passes"),
    "hours": ("less", "time"),
    "tokens": ("fewer", "tokens"),
}


def percent(value: float) -> str:
    """0.4132 → `41.3%`."""
    return f"{100 * value:.1f}%" if value == value else UNKNOWN


def points(difference: float) -> str:
    """A difference of shares in percentage points: 0.021 → `+2.1`, −0.021 → `−2.1` with a true minus."""
    return f"{100 * difference:+.1f}".replace("-", "−")


def hours(value: float) -> str:
    """Hours as `4 ms`, `4.2 s`, `2 min 25 s`, `3 h 12 min` or `2 d 7 h`."""
    seconds = 3600 * value
    if not 0 <= seconds < math.inf:
        return UNKNOWN
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def ratio(speed_up: float, axis: Axis) -> str:
    """Cost of the baseline / cost of the candidate as what it is: 2 → `2.0× fewer`, 0.5 → `2.0× more`."""
    larger = max(speed_up, 1 / speed_up)
    if f"{larger:.1f}" == "1.0":
        return "equal"
    return f"{larger:.1f}× {_COMPARED[axis][0] if speed_up > 1 else 'more'}"


def ratio_words(speed_up: float, axis: Axis) -> str:
    """The same with its noun: `2.0× fewer steps`, `equal time`."""
    return f"{ratio(speed_up, axis)} {_COMPARED[axis][1]}"


def ratio_interval(interval: Interval, axis: Axis) -> str:
    """`2.2× fewer (1.6 to 3.0)`; a bound on the other side of 1 is written out."""
    return ratio(interval.mean, axis) + ratio_bounds(interval, axis)


def ratio_bounds(interval: Interval, axis: Axis) -> str:
    """The bounds alone, ` (1.6 to 3.0)`; empty without them or where both are equal to 1."""
    if interval.low is None or interval.high is None:
        return ""
    if interval.low > 1:
        bounds = f"{interval.low:.1f} to {interval.high:.1f}"
    elif interval.high < 1:
        bounds = f"{1 / interval.high:.1f} to {1 / interval.low:.1f}"
    else:
        bounds = f"{ratio(interval.low, axis)} to {ratio(interval.high, axis)}"
    return "" if bounds == "equal to equal" else f" ({bounds})"
