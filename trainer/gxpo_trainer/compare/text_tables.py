"""Tables of a comparison as plain text cells, for terminal, report and service. Pure.

The paper's (arXiv 2605.06755): convergence_table is Table 2, budget_table Tables 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gxpo_client.formats import NONE, percent
from gxpo_trainer.compare.curves import GRID_OF, SAME, Axis
from gxpo_trainer.compare.evidence import (
    COSTS,
    NAMES,
    amount,
    bounds,
    points,
    ratio,
    ratio_interval,
)
from gxpo_trainer.compare.groups import (
    Comparison,
    GroupResult,
    Reach,
    passes_per_step,
    payoff_of,
)
from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.seeds import SeedGroup


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the row and is left-aligned, the others right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> str:
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in (table.header, *table.rows))
    head, *body = (f"| {' | '.join(cells)} |" for cells in escaped)
    return "\n".join([f"*{table.title}*", "", head, "|" + "---|" * len(table.header), *body])


def all_tables(groups: Sequence[SeedGroup], comparison: Comparison, share: float | None = None) -> list[Table]:
    """Ranking, convergence with plateaus, accuracy at equal budgets, when it pays, and differences.

    share: of a baseline step that sampling takes; by default as measured in the baseline's runs.
    """
    tables = [
        ranking_table(comparison),
        convergence_table(comparison),
        budget_table(comparison),
        *payoff_tables(groups, comparison, share),
    ]
    return tables + ([difference_table(comparison)] if comparison.differences else [])


def ranking_table(comparison: Comparison) -> Table:
    """One row per group by accuracy at the largest common budget of backward passes.

    Intervals are over seeds; a difference pairs the seeds that the group shares with the baseline.
    """
    header = ("run", "seeds", "accuracy", f"against {comparison.baseline}", "passes to the baseline's best")
    seeds = [seed for group in comparison.groups for seed in group.by_seed]
    most = min((seed.final.backward_passes for seed in seeds if seed.final.steps), default=0.0)
    rows, budget, what = [], "equal", "the most that all runs reached"
    for place, group in enumerate(comparison.ranking, start=1):
        name, cells, result = group.name, [NONE, NONE], group.at_equal_passes
        if result is not None:
            budget, own = amount("backward_passes", result.budget), result.accuracy
            if result.budget < most - SAME:
                what = "the last point that all runs share"
            accuracy = _within(lambda share: percent(min(1.0, max(0.0, share))), own)
            name, cells = f"{place}. {name}", [accuracy, _within(points, result.over_seeds)]
        rows.append((name, str(len(group.seeds)), *cells, _match(group, "backward_passes")))
    title = f"Ranking at {budget} backward passes, {what}"
    return Table(f"{title} ({100 * comparison.level:g}% intervals over seeds)", header, tuple(rows))


def _within(show: Callable[[float], str], interval: Interval | None) -> str:
    """`+2.1 (−0.4 to +4.6)`, or what is known of it."""
    if interval is None:
        return NONE
    known = [show(value) for value in (interval.mean, interval.low, interval.high) if value is not None]
    return "{} ({} to {})".format(*known) if len(known) == 3 else known[0]


def convergence_table(comparison: Comparison) -> Table:
    """One row per group: its peak, the cost to match the baseline's peak, speed-ups, and what became of the plateau."""
    header = ("run", "best", "at step", *(f"{NAMES[axis]} to match" for axis in COSTS), "plateau")
    rows = []
    for group in comparison.groups:
        costs = (_match(group, axis) for axis in COSTS)
        one = group.plateau
        plateau = NONE if one is None else f"{points(one.difference.mean)} ({one.verdict})"
        rows.append((group.name, percent(group.peak.accuracy), f"{group.peak.steps:,.0f}", *costs, plateau))
    target = comparison.target
    best = f"best of {comparison.baseline}: {percent(target.accuracy)} at step {target.steps:,.0f}"
    return Table(f"To match the {best}; ratios at common evaluations", header, tuple(rows))


def reach_cell(reach: Reach) -> str:
    """`1.7 [1.6, 1.9]; 1.5 [1.4, 1.6]`: by first crossing, interpolated; a dash where a seed did not get there."""

    def shown(interval: Interval | None) -> str:
        if interval is None:
            return NONE
        bounds = dict.fromkeys(f"{bound:.2f}" for bound in (interval.low, interval.high) if bound is not None)
        return f"{interval.mean:.2f}" + (f" [{', '.join(bounds)}]" if len(bounds) == 2 else "")

    both = (reach.first, reach.interpolated) if GRID_OF[reach.axis] == reach.axis else (reach.interpolated,)
    return NONE if not any(both) else "; ".join(map(shown, both))


def budget_table(comparison: Comparison) -> Table:
    """Accuracy at equal budgets: the last evaluation at or before the budget counts."""
    header = ("budget", "run", "accuracy", f"against {comparison.baseline}", "over seeds", "over problems, these seeds")
    rows = []
    keys = list(dict.fromkeys((b.axis, b.budget) for group in comparison.groups for b in group.budgets))
    for axis, budget in keys:
        for number, group in enumerate(comparison.groups):
            cost = amount(axis, budget) + ("" if axis == "hours" else f" {NAMES[axis]}")
            head = (cost if number == 0 else "", group.name)
            result = next((b for b in group.budgets if (b.axis, b.budget) == (axis, budget)), None)
            if result is None:
                rows.append((*head, *[NONE] * 4))
                continue
            reached = "" if result.all_reached else " (ended before)"
            mean = points(result.over_seeds.mean) if result.over_seeds else NONE
            intervals = (bounds(result.over_seeds) or NONE, bounds(result.over_problems) or NONE)
            rows.append((*head, percent(result.accuracy.mean) + reached, mean, *intervals))
    level = f"{100 * comparison.level:g}%"
    return Table(f"Accuracy at equal budgets (points; {level} intervals of the difference)", header, tuple(rows))


def difference_table(comparison: Comparison) -> Table:
    """Settings and hardware that differ between groups."""
    names = [group.name for group in comparison.groups]
    rows = tuple(
        (row.setting + (" (hardware)" if row.hardware else ""), *(" / ".join(row.values[name]) for name in names))
        for row in comparison.differences
    )
    return Table("Not equal in these runs", ("setting", *names), rows)


def payoff_tables(groups: Sequence[SeedGroup], comparison: Comparison, share: float | None) -> list[Table]:
    """Speed-up in time at a sampling share, by default as measured in the baseline's runs; empty where none was.

    Whether it holds against a baseline tuned for speed, runs cannot tell.
    """
    baseline, source = comparison.group(comparison.baseline), "as given"
    if share is None:
        runs = next(group.runs for group in groups if group.name == baseline.name)
        measured = [run.sampling_share for run in runs if run.sampling_share is not None]
        share, source = (float(np.mean(measured)), "measured") if measured else (None, "")
    if share is None or len(groups) == 1:
        return []
    rows = []
    for group in comparison.groups:
        if group.name == baseline.name:
            continue
        steps = group.seed_speed_ups["steps"]
        time, overlapped = (payoff_of(group, share, asynchronous=overlap) for overlap in (False, True))
        if steps is None or time is None or overlapped is None:
            reached = f"{group.num_reached} of {group.num_paired} seeds reach the peak"
            rows.append((group.name, reached, *[NONE] * 3))
            continue
        cells = (ratio_interval(steps, "steps"), *(ratio_interval(ratio, "hours") for ratio in (time, overlapped)))
        rows.append((group.name, *cells, f"{passes_per_step(group):.2f}"))
    header = ("run", "steps", "time", "time, asynchronous", "passes per step")
    title = f"When it pays: sampling takes {100 * share:.0f}% of a step of {baseline.name} ({source})"
    return [Table(title, header, tuple(rows))]


def _match(group: GroupResult, axis: Axis) -> str:
    if group.match is None:
        return NONE if group.unshared else "not reached"
    speed_up = group.speed_ups[axis]
    words = "" if speed_up is None else ratio(speed_up, axis).replace("equal", "1.00×")
    return amount(axis, group.match.cost(axis)) + (f" ({words})" if words else "")
