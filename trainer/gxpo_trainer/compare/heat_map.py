"""Heat map of a sweep over two settings: the mean over the runs of each pair of values. Pure."""

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
    """interval: mean with its t-interval over the runs that have a value; None if none has."""

    x: int
    y: int
    interval: Interval | None
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """x_values, y_values: values in axis order; cells: non-empty cells, row by row of y.

    A cell's runs are indices into the given sequence. mixed: other settings that vary within a cell.
    """

    x: str
    y: str
    x_values: tuple[Any, ...]
    y_values: tuple[Any, ...]
    cells: tuple[HeatCell, ...]
    mixed: tuple[str, ...]


def varied_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings with more than one value among the runs, in order of appearance."""
    names = dict.fromkeys(name for run in settings for name in run)
    return [name for name in names if len({_key(run.get(name)) for run in settings}) > 1]


def heat_map(
    settings: Sequence[Mapping[str, Any]], values: Sequence[float | None], x: str, y: str, level: float = 0.95
) -> HeatMap:
    """Mean value for each pair of values of the settings `x` and `y`.

    settings: of each run by dotted path, without the seed. values: of each run, None or not finite if missing. Raises
    ValueError when x equals y, or a run lacks one of the two settings.
    """
    if x == y:
        raise ValueError(f"x and y are both {x}; choose two settings")
    for name in (x, y):
        if any(name not in run for run in settings):
            raise ValueError(f"{name} is not a setting of every run")
    x_values, y_values = (_in_order([run[name] for run in settings]) for name in (x, y))
    columns, rows = ([_key(value) for value in values] for values in (x_values, y_values))
    members_of: dict[tuple[int, int], list[int]] = {}
    for index, run in enumerate(settings):
        members_of.setdefault((rows.index(_key(run[y])), columns.index(_key(run[x]))), []).append(index)
    cells = []
    for (row, column), members in sorted(members_of.items()):
        known = [float(v) for i in members if (v := values[i]) is not None and math.isfinite(v)]
        cells.append(HeatCell(column, row, mean_interval(known, level) if known else None, tuple(members)))
    mixed = dict.fromkeys(
        name for members in members_of.values() for name in varied_settings([settings[i] for i in members])
    )
    return HeatMap(x, y, tuple(x_values), tuple(y_values), tuple(cells), tuple(mixed))


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Unique values; numbers ascending, anything else in order of appearance."""
    unique = list({_key(value): value for value in values}.values())
    numeric = all(_number(value) is not None for value in unique)
    return sorted(unique, key=lambda value: _number(value) or 0.0) if numeric else unique


def _key(value: Any) -> str:
    """A key that is equal for equal values: 1 equals 1.0, but not True."""
    number = _number(value)
    return json.dumps(value if number is None else number, sort_keys=True)


def _number(value: Any) -> float | None:
    """The value as a number, including JSON's strings for non-finite ones; None for anything else."""
    try:
        return decode_number(value)
    except ValueError:
        return None
