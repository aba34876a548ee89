"""Base class and types of all settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of all settings classes: unknown settings are rejected, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=True, protected_namespaces=())


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
