"""Memory of one process."""

from __future__ import annotations

import resource


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far. Linux counts it in KiB (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
