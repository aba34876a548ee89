"""Rules of a problem in addition to its gold answer: a tolerance, a unit, several answers.

Plain data in a prompt's `extra`, sent to the worker as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EXTRA_KEY = "verify"
"""Where a prompt's `extra`, and a line of `gxpo grade`, hold the options."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Rules of one problem.

    tolerance: largest absolute error of the answer; one for all answers, or one for each in the gold's order; empty:
        none. unit: of the gold; an answer in another unit of the same quantity is converted first. several: the gold
        is a list of answers, to be given completely, in any order, in one box or in several; a comma in it is never
        a decimal or thousands separator. boxed: only a box holds an answer.

    Raises ValueError for a tolerance below 0 or not finite, or an empty unit.
    """

    tolerance: tuple[float, ...] = ()
    unit: str | None = None
    several: bool = False
    boxed: bool = False

    def __post_init__(self) -> None:
        if any(not (math.isfinite(value) and value >= 0) for value in self.tolerance):
            raise ValueError(f"tolerance = {list(self.tolerance)}: must be finite numbers of at least 0")
        if self.unit is not None and not self.unit.strip():
            raise ValueError("unit is empty; leave it out")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only what is set."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items() if v}

    @classmethod
    def from_dict(cls, body: Any) -> VerifyOptions:
        """From parsed JSON; `tolerance` may be a number or a list. Raises ValueError naming what is wrong."""
        if not isinstance(body, Mapping):
            raise ValueError(f"is {type(body).__name__} instead of an object with tolerance, unit, several, boxed")
        unknown = sorted(set(body) - {"tolerance", "unit", "several", "boxed"})
        if unknown:
            raise ValueError(f"has the unknown key {unknown[0]!r}; use tolerance, unit, several, boxed")
        tolerance, unit = body.get("tolerance", []), body.get("unit")
        numbers = tolerance if isinstance(tolerance, list) else [tolerance]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
            raise ValueError(f"tolerance = {tolerance!r}: must be a number or a list of numbers")
        if not (unit is None or isinstance(unit, str)):
            raise ValueError(f"unit = {unit!r}: must be text")
        switches = {name: body.get(name, False) for name in ("several", "boxed")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} = {value!r}: must be true or false")
        return cls(tuple(float(value) for value in numbers), unit, **switches)
