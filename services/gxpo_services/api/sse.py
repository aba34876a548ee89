"""Server-Sent Events: their form, and whether their reader may still read."""

from __future__ import annotations

import json
from typing import Any

from gxpo_services.access.repository import find_by_secret
from gxpo_services.db.database import Database

MEDIA_TYPE = "text/event-stream"
CONTENT: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}
"""Of a response in the OpenAPI description."""
COMMENT = b": waiting\n\n"
"""Keeps the connection open."""


def event(kind: str, data: Any, number: int | None = None) -> bytes:
    """An event. JSON has no bare line ends, so a text of many lines is one line of data."""
    head = f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def is_valid(database: Database, token: str) -> bool:
    """Whether a token has not been revoked since its stream began."""
    with database.autocommit_connection() as connection:
        return find_by_secret(connection, token) is not None
