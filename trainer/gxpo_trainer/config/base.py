"""Base class and types of all settings."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of all settings classes: unknown settings are rejected, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=True, protected_namespaces=())


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def known_or_class(name: str, known: Collection[str]) -> str:
    """The name of a built-in component or a class as `package.module:Class`. Raises ValueError for anything else."""
    if name not in known and not _CLASS_PATH.fullmatch(name):
        raise ValueError(f"must be one of {', '.join(known)}, or a class as package.module:Class")
    return name
