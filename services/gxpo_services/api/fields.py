"""Field types of requests and responses: ids, storable text, and numbers including NaN and the infinities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from gxpo_trainer.jsonl import plain

MAX_INTEGER = 2**63 - 1
"""Largest integer that the databases store."""
MAX_STEP = 2**31 - 1
"""Largest step, attempt or launch."""
MAX_DEPTH = 32
"""Maximum nesting of free-form JSON."""

JsonNumber = Annotated[float | Literal["NaN", "Infinity", "-Infinity"], BeforeValidator(plain)]
"""A number, or one of the strings for the values that JSON cannot represent."""


def text_fault(text: str) -> str | None:
    """Reason why a text cannot be stored; None if it can."""
    if "\x00" in text:
        return "must not contain a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must not contain a lone surrogate"
    return None


def _storable(text: str) -> str:
    fault = text_fault(text)
    if fault is not None:
        raise ValueError(fault)
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""Text that both SQLite and PostgreSQL can store."""
Word = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
Tag = Annotated[Text, StringConstraints(strip_whitespace=True, min_length=1, max_length=60)]

_ID = r"^[A-Za-z0-9_-]{1,64}$"
RunId = Annotated[str, Path(pattern=_ID, description="Id of a run.", examples=["r01jd5cv3q80000000000"])]
GroupId = Annotated[str, Path(pattern=_ID, description="Id of a group.", examples=["g01jd5cv3q80000000000"])]
Id = Annotated[str, Field(pattern=_ID)]


def faults(value: Any) -> list[tuple[str, str]]:
    """(dotted path, error) for texts, integers and depths in free-form JSON that the databases cannot store."""
    found: list[tuple[str, str]] = []
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        path, item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            found.append((path, f"is nested deeper than {MAX_DEPTH} levels"))
        elif isinstance(item, str):
            fault = text_fault(item)
            if fault is not None:
                found.append((path, fault))
        elif isinstance(item, int) and abs(item) > MAX_INTEGER:
            found.append((path, f"must be an integer of at most {MAX_INTEGER}"))
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if text_fault(key) is not None:
                    found.append((path, "has a key that cannot be stored"))
                else:
                    waiting.append((f"{path}.{key}" if path else key, inner, depth + 1))
        elif isinstance(item, list | tuple):
            waiting += [(f"{path}[{number}]", inner, depth + 1) for number, inner in enumerate(item)]
    return sorted(found)
