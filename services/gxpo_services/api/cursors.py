"""Opaque keyset cursors: sort value and row number of the last row of a page.

A cursor grants no access, so it is validated but not signed: its order must match the request, and its value must have
the type of the column, because it is compared in SQL.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from gxpo_services.api.errors import Invalid
from gxpo_services.api.fields import MAX_INTEGER, MAX_STEP, Text
from gxpo_trainer.jsonl import decode_number, plain

Kind = Literal["text", "int32", "int64", "float"]
Value = str | int | float | None


def _integer(low: int, high: int) -> Any:
    return Annotated[int, Field(strict=True, ge=low, le=high)]


_NUMBER: TypeAdapter[int] = TypeAdapter(_integer(0, MAX_INTEGER))
_VALUES: dict[Kind, TypeAdapter[Any]] = {
    "text": TypeAdapter(Annotated[Text, Field(strict=True)] | None),
    "int32": TypeAdapter(_integer(-MAX_STEP, MAX_STEP) | None),
    "int64": TypeAdapter(_integer(-MAX_INTEGER, MAX_INTEGER) | None),
    "float": TypeAdapter(Annotated[float, BeforeValidator(decode_number)] | None),
}


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
        position = Position(_VALUES[kind].validate_python(value), _NUMBER.validate_python(number))
    except (ValueError, TypeError, RecursionError):
        raise Invalid.of("cursor", "is not a cursor of this list; pass next_cursor unchanged") from None
    if of_order != order:
        raise Invalid.of("cursor", "belongs to another order; leave it out when sort, order or metric_at change")
    return position
