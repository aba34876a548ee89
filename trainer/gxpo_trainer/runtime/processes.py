"""Memory, garbage collection and failed writes of one process."""

from __future__ import annotations

import gc
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def peak_resident_bytes() -> int:
    """Peak resident set size of this process, in bytes. Linux reports KiB (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Present resident set size of this process, in bytes (proc_pid_statm(5))."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@contextmanager
def frozen_allocations() -> Iterator[None]:
    """Exclude the objects allocated in this block from garbage collection, during the block and after it.

    Importing an engine allocates a million objects, and building one runs several collections at half a second each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@contextmanager
def write_errors() -> Iterator[None]:
    """Raise OSError where safetensors or tokenizers cannot write a file: their own errors have its number in the text
    alone."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)$", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number)) from error
