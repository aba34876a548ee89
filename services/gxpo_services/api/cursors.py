"""Opaque keyset cursors: sort value and row number of the last row of a page.

A cursor grants no access, so it is validated but not signed: its order must match the request, and its value must have
the type of the column, because it is compared in SQL.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Literal

from gxpo_services.api.errors import Invalid
from gxpo_services.api.fields import MAX_INTEGER, text_fault
from gxpo_trainer.jsonl import decode_number, plain

Kind = Literal["text", "int32", "int64", "float"]
Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a row in an order: its sort value (None: no value) and its number as tie-breaker."""

    value: Value
    number: int


def encode(order: str, position: Position) -> str:
    """Encode a position. order: the sort key of the list, as one word."""
    body = json.dumps([order, plain(position.value), position.number], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def decode(cursor: str, order: str, kind: Kind) -> Position:
    """Decode a cursor. Raises Invalid when it is malformed or belongs to another order."""
    try:
        body = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        of_order, value, number = body
        if of_order != order:
            raise Invalid.of("cursor", "belongs to another order; leave it out when sort, order or metric_at change")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_INTEGER:
            raise ValueError("no row number")
        return Position(_value(value, kind), number)
    except (ValueError, TypeError, RecursionError):
        raise Invalid.of("cursor", "is not a cursor of this list; pass next_cursor unchanged") from None


def _value(value: object, kind: Kind) -> Value:
    if value is None:
        return None
    if kind == "text":
        if not isinstance(value, str) or text_fault(value) is not None:
            raise ValueError("no text")
        return value
    if kind == "float":
        return decode_number(value)
    largest = 2**31 - 1 if kind == "int32" else MAX_INTEGER
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > largest:
        raise ValueError("no number of the column")
    return value
