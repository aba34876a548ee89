"""Tables of a comparison as plain text cells, for the terminal and the HTML report alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gxpo_trainer.compare import (
    Axis,
    Comparison,
    GroupResult,
    Interval,
    SeedGroup,
    evidence_sentence,
    format_hours,
    mean_curve,
)

_AXES: tuple[Axis, ...] = ("steps", "backward_passes", "hours")
_NAMES = {"steps": "steps", "backward_passes": "BP", "hours": "time", "tokens": "tokens"}
_MOST_ROWS = 12
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the row and is set left, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def all_tables(groups: Sequence[SeedGroup], comparison: Comparison) -> list[Table]:
    """Results, convergence, accuracy at equal budgets, the curves, and what was not equal."""
    tables = [result_table(comparison), convergence_table(comparison), budget_table(comparison), curve_table(groups)]
    return tables + ([difference_table(comparison)] if comparison.differences else [])


def result_table(comparison: Comparison) -> Table:
    """One row a group: where it ended and what that took."""
    header = ("run", "seeds", "accuracy", "steps", "BP", "time", "shut-off step")
    rows = []
    for group in comparison.groups:
        shut = sorted({step for step in group.shutoff_steps if step is not None})
        costs = (_cost(axis, group.final.cost(axis)) for axis in _AXES)
        shown = "/".join(str(step) for step in shut) if shut else UNKNOWN
        rows.append((group.name, str(len(group.seeds)), percent(group.final.accuracy), *costs, shown))
    return Table("Result at the end", header, tuple(rows))


def convergence_table(comparison: Comparison) -> Table:
    """One row a group: its best, and what it took to match the baseline's best, with the speed-ups."""
    header = ("run", "best", "at step", *(f"{_NAMES[axis]} to match" for axis in _AXES))
    rows = []
    for group in comparison.groups:
        costs = (_match(group, axis) for axis in _AXES)
        rows.append((group.name, percent(group.peak.accuracy), f"{group.peak.steps:.0f}", *costs))
    target = comparison.target
    best = f"best of {comparison.baseline}: {percent(target.accuracy)} at step {target.steps:.0f}"
    smoothing = f", exponential average {comparison.smoothing:g}" if comparison.smoothing else ""
    return Table(f"To match the {best}{smoothing} (× = speed-up)", header, tuple(rows))


def budget_table(comparison: Comparison) -> Table:
    """Accuracy at equal budgets: the last evaluation at or before the budget counts."""
    header = ("budget", "run", "accuracy", f"against {comparison.baseline}", "over seeds", "over problems")
    rows = []
    keys = list(dict.fromkeys((b.axis, b.budget) for group in comparison.groups for b in group.budgets))
    for axis, budget in keys:
        amount = format_hours(budget) if axis == "hours" else f"{budget:.0f} {_NAMES[axis]}"
        for number, group in enumerate(comparison.groups):
            shown = amount if number == 0 else ""
            found = next((b for b in group.budgets if (b.axis, b.budget) == (axis, budget)), None)
            if found is None:
                rows.append((shown, group.name, *[UNKNOWN] * 4))
                continue
            reached = "" if found.all_reached else " (ended before)"
            seeds, problems = found.over_seeds, found.over_problems
            mean = f"{100 * seeds.mean:+.1f}" if seeds else UNKNOWN
            cells = (percent(found.accuracy.mean) + reached, mean, _bounds(seeds), _bounds(problems))
            rows.append((shown, group.name, *cells))
    level = f"{100 * comparison.level:g} %"
    return Table(f"Accuracy at equal budgets (points; {level} intervals of the difference)", header, tuple(rows))


def curve_table(groups: Sequence[SeedGroup]) -> Table:
    """Accuracy by step, with what had been spent; at most a dozen rows, the first and the last among them."""
    curves = [mean_curve([run.curve for run in group.runs]) for group in groups]
    steps = sorted({float(step) for curve in curves for step in curve.steps})
    if len(steps) > _MOST_ROWS:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _MOST_ROWS).round().astype(int))]
    rows = []
    for step in steps:
        cells = [f"{step:.0f}"]
        for curve in curves:
            found = np.flatnonzero(curve.steps == step)
            if found.size == 0:
                cells.append(UNKNOWN)
                continue
            i = int(found[0])
            minutes = 60 * float(curve.hours[i])
            spent = f"{_cost('backward_passes', curve.backward_passes[i])}, {minutes:.1f}"
            cells.append(f"{100 * curve.accuracy[i]:.1f} ({spent})")
        rows.append(tuple(cells))
    header = ("step", *(group.name for group in groups))
    return Table("Accuracy in % by step (in brackets: BP, minutes)", header, tuple(rows))


def difference_table(comparison: Comparison) -> Table:
    """Settings and hardware that were not the same everywhere."""
    names = [group.name for group in comparison.groups]
    rows = tuple(
        (found.setting + (" (hardware)" if found.hardware else ""), *(" / ".join(found.values[n]) for n in names))
        for found in comparison.differences
    )
    return Table("Not equal in these runs", ("setting", *names), rows)


def print_tables(groups: Sequence[SeedGroup], comparison: Comparison, console: Console | None = None) -> None:
    """The comparison on a terminal, the evidence sentence last."""
    console = console if console is not None else Console()
    for table in all_tables(groups, comparison):
        shown = RichTable(
            title=Text(table.title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for number, name in enumerate(table.header):
            shown.add_column(Text(name), justify="left" if number == 0 else "right")
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    console.print(Text(evidence_sentence(comparison)))


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value == value else UNKNOWN


def _cost(axis: Axis, value: float) -> str:
    if value != value:
        return UNKNOWN
    return format_hours(value) if axis == "hours" else f"{value:.0f}"


def _match(group: GroupResult, axis: Axis) -> str:
    if group.match is None:
        return "not reached"
    ratio = group.speed_ups[axis]
    return _cost(axis, group.match.cost(axis)) + (f" ({ratio:.2f}×)" if ratio is not None else "")


def _bounds(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return UNKNOWN
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
