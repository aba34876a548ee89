"""Memory of one process."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far. Linux counts it in KiB (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def lasting() -> Iterator[None]:
    """What is made in this block stays for good, so no collection ever looks through it, in the block or later.

    Importing an engine makes a million objects; those that build engines collect several times, at half a second each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
