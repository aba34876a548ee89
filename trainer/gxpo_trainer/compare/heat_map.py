"""A sweep over two settings as a table of cells: the mean over the runs of each pair of values. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gxpo_trainer.compare.intervals import Interval, mean_interval
from gxpo_trainer.jsonl import decode_number


@dataclass(frozen=True, slots=True)
class HeatCell:
    """interval: mean with its t-interval over the runs that have a value; None when there is none yet."""

    x: int
    y: int
    interval: Interval | None
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """x_values, y_values: in order of their axes; cells: those that a run belongs to, row by row of y.

    runs in a cell are places in the sequence that was given. mixed: other settings that vary within a cell, over
    which its mean is taken, too.
    """

    x: str
    y: str
    x_values: tuple[Any, ...]
    y_values: tuple[Any, ...]
    cells: tuple[HeatCell, ...]
    mixed: tuple[str, ...]


def varied_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings with more than one value among the runs, in order of appearance."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({_key(one.get(name)) for one in settings}) > 1]


def heat_map(
    settings: Sequence[Mapping[str, Any]], values: Sequence[float | None], x: str, y: str, level: float = 0.95
) -> HeatMap:
    """Cells of one mean a pair of values of `x` and `y`.

    settings: of each run by dotted path, seed left out. values: of each run, None (or not finite) where it has none.
    Raises ValueError when x is y, or a run states one of the two nowhere.
    """
    if x == y:
        raise ValueError(f"x and y are both {x}; name two settings")
    for name in (x, y):
        if any(name not in one for one in settings):
            raise ValueError(f"{name} is not a setting of every run")
    x_values, y_values = (_in_order([one[name] for one in settings]) for name in (x, y))
    places: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(settings):
        key = ([_key(v) for v in y_values].index(_key(one[y])), [_key(v) for v in x_values].index(_key(one[x])))
        places.setdefault(key, []).append(index)
    cells = []
    for (row, column), members in sorted(places.items()):
        known = [float(v) for i in members if (v := values[i]) is not None and math.isfinite(v)]
        cells.append(HeatCell(column, row, mean_interval(known, level) if known else None, tuple(members)))
    mixed = dict.fromkeys(
        name for members in places.values() for name in varied_settings([settings[i] for i in members])
    )
    return HeatMap(x, y, tuple(x_values), tuple(y_values), tuple(cells), tuple(mixed))


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Each value once; numbers ascending, everything else in order of appearance."""
    found = list({_key(value): value for value in values}.values())
    numbers = [_number(value) for value in found]
    if any(number is None for number in numbers):
        return found
    return [value for _, value in sorted(zip(numbers, found, strict=True), key=lambda pair: float(pair[0] or 0.0))]


def _key(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are one, True and 1 are two."""
    number = _number(value)
    return json.dumps(value if number is None else number, sort_keys=True)


def _number(value: Any) -> float | None:
    """Infinities are words in JSON, and numbers all the same."""
    try:
        return decode_number(value)
    except ValueError:
        return None
