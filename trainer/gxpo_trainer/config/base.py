"""What all parts of a run's settings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of all parts: unknown settings are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=True, protected_namespaces=())


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
