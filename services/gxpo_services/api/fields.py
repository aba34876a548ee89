"""Field types of requests and responses: ids, storable text, numbers including NaN and the infinities, and cursors.

A public id is one letter for the kind, a timestamp and random bits; ids sort by creation time. A cursor is the sort
value and the row number of the last row of a page. It grants no access, so it is validated but not signed: its order
must match the request, and its value must have the type of the column, because it is compared in SQL."""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar

from fastapi import Path
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from gxpo_services.api.errors import Invalid
from gxpo_trainer.config.base import LARGEST_INTEGER, MOST_STEPS
from gxpo_trainer.config.messages import MOST_ERRORS
from gxpo_trainer.jsonl import decode_number, plain

MAX_INTEGER = LARGEST_INTEGER
MAX_STEP = MOST_STEPS
MAX_DEPTH = 32
MAX_VALUES = 10_000

JsonNumber = Annotated[float | Literal["NaN", "Infinity", "-Infinity"], BeforeValidator(plain)]
"""A number, or one of the strings for the values that JSON cannot represent."""


ODD_CHARACTER = re.compile(r"[\x00\ud800-\udfff]")
"""What the databases cannot store."""
_ODD_TEXT = "must not contain a NUL character or a lone surrogate"


def _storable(text: str) -> str:
    if ODD_CHARACTER.search(text):
        raise ValueError(_ODD_TEXT)
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""Text that both SQLite and PostgreSQL can store."""
# The constraints come first: behind a validator the length counts before the spaces are stripped.
Word = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200), AfterValidator(_storable)]
Tag = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60), AfterValidator(_storable)]


class Body(BaseModel):
    """Base of request bodies: no unknown members, and no member of another type, as `false` for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


_ID = r"^[A-Za-z0-9_-]{1,64}$"
RunId = Annotated[str, Path(pattern=_ID, description="Id of a run.", examples=["r01jd5cv3q80000000000"])]
GroupId = Annotated[str, Path(pattern=_ID, description="Id of a group.", examples=["g01jd5cv3q80000000000"])]
TokenId = Annotated[str, Path(pattern=_ID, description="Id of a token.", examples=["t01jd5cv3q80000000000"])]
Id = Annotated[str, Field(pattern=_ID)]


def read_json(data: bytes | str) -> Any:
    """The value in JSON from an untrusted source, whose size the caller has limited.

    Raises ValueError for anything but JSON: for NaN and Infinity, for numbers that no float can hold (1e999), and for
    nesting deeper than _MAX_NESTING levels, which would exhaust the stack of whatever walks through the value.
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MAX_NESTING} levels") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_NESTING):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_MAX_NESTING} levels")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a JSON number of double precision; NaN and infinities are strings")


_MAX_NESTING = 64
"""More than MAX_DEPTH, because free-form parts lie within a request."""
_LONGEST_KEY = 100


def faults(value: Any) -> list[tuple[str, str]]:
    """(dotted path, error) for texts, integers and depths in free-form JSON that the databases cannot store, or for
    more than MAX_VALUES values. Paths contain at most MAX_DEPTH keys of _LONGEST_KEY characters."""
    reasons: list[tuple[str, str]] = []
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    visited = 0
    while waiting:
        if visited + len(waiting) > MAX_VALUES:
            return [("", f"has more than {MAX_VALUES} values")]
        visited += 1
        path, item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            reasons.append((path, f"is nested deeper than {MAX_DEPTH} levels"))
        elif isinstance(item, str) and ODD_CHARACTER.search(item):
            reasons.append((path, _ODD_TEXT))
        elif isinstance(item, int) and abs(item) > MAX_INTEGER:
            reasons.append((path, f"must be an integer of at most {MAX_INTEGER}"))
        elif isinstance(item, Mapping | list | tuple) and len(item) > MAX_VALUES:
            reasons.append((path, f"has more than {MAX_VALUES} values"))
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if len(key) > _LONGEST_KEY:
                    reasons.append((path, f"has a key of more than {_LONGEST_KEY} characters"))
                elif ODD_CHARACTER.search(key):
                    reasons.append((path, "has a key that cannot be stored"))
                else:
                    waiting.append((f"{path}.{key}" if path else key, inner, depth + 1))
        elif isinstance(item, list | tuple):
            waiting += [(f"{path}[{number}]", inner, depth + 1) for number, inner in enumerate(item)]
    return sorted(reasons)[:MOST_ERRORS]


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: without i, l, o, u


def new_id(kind: str, now: float | None = None) -> str:
    """`kind` + 10 characters of milliseconds since 1970 + 10 random characters (50 bits)."""
    millis = int((time.time() if now is None else now) * 1000)
    number = millis << 50 | secrets.randbits(50)
    return kind + "".join(_ALPHABET[number >> shift & 31] for shift in range(95, -1, -5))


Item = TypeVar("Item")
Kind = Literal["text", "int32", "int64", "float"]
Value = str | int | float | None


_NUMBER: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)])
_VALUES: dict[Kind, TypeAdapter[Any]] = {
    "text": TypeAdapter(Annotated[Text, Field(strict=True)] | None),
    "int32": TypeAdapter(Annotated[int, Field(strict=True, ge=-MAX_STEP, le=MAX_STEP)] | None),
    "int64": TypeAdapter(Annotated[int, Field(strict=True, ge=-MAX_INTEGER, le=MAX_INTEGER)] | None),
    "float": TypeAdapter(Annotated[float, BeforeValidator(decode_number)] | None),
}


class PageQuery(BaseModel):
    """Which page of a list."""

    limit: int = Field(50, ge=1, le=200, description="Page size.")
    cursor: Text | None = Field(None, max_length=2000, description="`next_cursor` of the previous page.")


class Page(BaseModel, Generic[Item]):
    """A page of a list."""

    items: list[Item]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")


def encode_cursor(order: str, value: Value, number: int) -> str:
    """The cursor of a row in an order: its sort value (None: no value) and its number as tie-breaker.

    order: the sort key of the list, as one word.
    """
    body = json.dumps([order, plain(value), number], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, order: str, kind: Kind) -> tuple[Any, int]:
    """Sort value and number in a cursor. Raises Invalid when it is malformed or belongs to another order."""
    try:
        body = read_json(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        of_order, value, number = body
        row = _VALUES[kind].validate_python(value), _NUMBER.validate_python(number)
    except (ValueError, TypeError):
        raise Invalid.of("cursor", "is not a cursor of this list; pass next_cursor unchanged") from None
    if of_order != order:
        raise Invalid.of("cursor", "belongs to another order; leave it out when sort, order or metric_at change")
    return row
