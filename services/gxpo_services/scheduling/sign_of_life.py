"""A file in a scheduler's home whose time is that of its last round, for health checks of its container."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

FILE = "scheduler-round"
LONGEST_ROUND_S = 120.0
"""A round waits for Ray and for the database, each at most a minute."""


def mark(home: Path) -> None:
    """Note the end of a round. A disk that fails is no reason to stop."""
    with suppress(OSError):
        (home / FILE).touch()


def age_s(home: Path) -> float | None:
    """Seconds since the last round of a scheduler with this home; None before the first."""
    try:
        return time.time() - (home / FILE).stat().st_mtime
    except FileNotFoundError:
        return None
