"""Text of numbers, durations, times and CSV cells, the same everywhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeGuard

NONE = "–"
MINUS = "−"
"""Sign of numbers, also of an exponent."""


def known(value: Any) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def percent(value: Any, digits: int = 1) -> str:
    """0.4132 → `41.3%`."""
    return f"{100 * value:z.{digits}f}%".replace("-", MINUS) if known(value) else NONE


def share_done(fraction: float) -> str:
    """0.413 → `41%`; 100% only once all is done."""
    return percent(fraction if fraction >= 1 else min(fraction, 0.99), 0)


def count(value: float | None) -> str:
    """12345.0 → `12,345`; fractions keep two digits."""
    if not known(value):
        return NONE
    return (f"{value:z,.0f}" if float(value).is_integer() else f"{value:z,.2f}").replace("-", MINUS)


def number_of(number: float, what: str) -> str:
    """`1 run`, `2 runs`, `3 passes`."""
    return f"{count(number)} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def by_reason(excluded: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names with their reasons. Of more than three with the same one, the first three and the number of the others."""
    names: dict[str, list[str]] = {}
    for name, reason in excluded:
        names.setdefault(reason, []).append(name)
    return [
        (name, reason)
        for reason, own in names.items()
        for name in (own if len(own) <= 3 else [f"{', '.join(own[:3])} and {len(own) - 3} more"])
    ]


def comma_separated(text: str) -> list[str]:
    """`a, b` → [a, b]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def figure(value: float | None, digits: int = 4) -> str:
    """A value with at most so many significant digits."""
    if value is None:
        return NONE
    if not known(value):
        return str(value)
    # Of `g` alone, a value that is rounded up to 10 ** digits would have an exponent.
    return (f"{value:z,.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:,.0f}").replace("-", MINUS)


def significant(value: float | None) -> str:
    """Three significant digits: 1.1 → `1.10`; -0.034567 → `−0.0346`; 1234.5 → `1,234`."""
    if not known(value):
        return NONE
    if value == 0:
        return "0"
    exponent = int(f"{value:.2e}".partition("e")[2])  # once rounded
    return (f"{value:,.{max(0, 2 - exponent)}f}" if exponent >= -4 else f"{value:.3g}").replace("-", MINUS)


def signed(value: float, digits: int = 2) -> str:
    """-0.25 → `−0.25`; 0.5 → `+0.50`."""
    return f"{value:+z.{digits}f}".replace("-", MINUS)


def duration(seconds: float | None) -> str:
    """0.004 → `4 ms`; 4.2 → `4.2 s`; 75 → `1 min 15 s`; 11520 → `3 h 12 min`; 200000 → `2 d 7 h`."""
    if not known(seconds) or seconds < 0:
        return NONE
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


def age(seconds: float) -> str:
    """75 → `1 min ago`; 11520 → `3 h ago`; less than a minute → `just now`."""
    unit = next(((size, name) for size, name in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= size), None)
    return f"{seconds // unit[0]:.0f} {unit[1]} ago" if unit else "just now"


def size(num_bytes: float | None) -> str:
    """1536 → `1.5 KiB`."""
    if not known(num_bytes):
        return NONE
    # The first unit in which less than 1024 is written.
    power = next((power for power in range(4) if round(abs(num_bytes) / 1024**power, min(power, 1)) < 1024), 4)
    return f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{num_bytes:.0f} B"


def moment(seconds: float | None) -> str:
    """Seconds since 1970 → `2026-05-04 13:37:00 UTC`."""
    if not known(seconds):
        return NONE
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets execute. Names and notes are free text of other people."""


def literal(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula with ' before it; any other value as it is."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
