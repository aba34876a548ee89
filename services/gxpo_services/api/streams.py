"""Streamed responses: Server-Sent Events, and the `Range` header of a download (RFC 9110, section 14)."""

from __future__ import annotations

import json
import re
from typing import Any

from gxpo_services.api.errors import RangeNotSatisfiable

MEDIA_TYPE = "text/event-stream"
CONTENT: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}
"""Of a response in the OpenAPI description."""
COMMENT = b": waiting\n\n"
"""Keeps the connection open."""


def event(kind: str, data: Any, number: int | None = None) -> bytes:
    """An event. JSON has no bare line ends, so a text of many lines is one line of data."""
    head = f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(data)}\n\n".encode()


_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a single range; None to send everything, also for several ranges.

    Raises RangeNotSatisfiable for a range behind the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    begin, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    if last and first and int(last) < begin:
        return None
    if begin >= size:
        raise RangeNotSatisfiable(f"the file has {size} bytes, so none from byte {begin} on")
    return begin, min(end, size)
