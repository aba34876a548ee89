"""Failed writes of libraries in Rust."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def write_errors() -> Iterator[None]:
    """Raise OSError where safetensors or tokenizers cannot write a file: their own errors have its number in the text
    alone."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)$", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
