"""Rules of a problem in addition to its gold answer: a tolerance, a unit, several answers.

Plain data in a prompt's `extra`, sent to the worker as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any

EXTRA_KEY = "verify"
"""Where a prompt's `extra`, and a line of `gxpo grade`, hold the options."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Rules of one problem.

    tolerance: largest absolute error of an answer. unit: of the gold; an answer in another unit of the same quantity is
    converted first. several: the gold is a list of answers, to be given completely, in any order, in one box or in
    several; a comma in it is never a decimal or thousands separator. boxed: only a box holds an answer.

    Raises ValueError for a tolerance below 0 or not finite, or an empty unit.
    """

    tolerance: float = 0.0
    unit: str | None = None
    several: bool = False
    boxed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance = {self.tolerance}: must be a finite number of at least 0")
        if self.unit is not None and not self.unit.strip():
            raise ValueError("unit is empty; leave it out")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only what is set."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, body: Any) -> VerifyOptions:
        """From parsed JSON. Raises ValueError naming what is wrong."""
        if not isinstance(body, Mapping):
            raise ValueError(f"is {type(body).__name__} instead of an object with tolerance, unit, several, boxed")
        kinds: dict[str, tuple[tuple[type, ...], str]] = {
            "tolerance": ((int, float), "a number"),
            "unit": ((str, NoneType), "text"),
            "several": ((bool,), "true or false"),
            "boxed": ((bool,), "true or false"),
        }
        for name, value in body.items():
            if name not in kinds:
                raise ValueError(f"has the unknown key {name!r}; use {', '.join(kinds)}")
            if type(value) not in kinds[name][0]:
                raise ValueError(f"{name} = {value!r}: must be {kinds[name][1]}")
        return cls(**body)
