"""Groups of seeds against a baseline: the paper's Tables 2 to 4 for any runs, with intervals. Pure.

A group is one configuration run with several seeds. Two views stand side by side: the mean curve over
seeds (what a table shows) and each seed against the baseline's run of the same seed (what the intervals
are made of; pairing takes out what the seed alone decides). Definitions are those of `curves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gxpo_trainer.compare.curves import (
    AXES,
    Axis,
    Point,
    RunCurves,
    at_budget,
    first_reaching,
    mean_curve,
    peak,
    smooth,
    speed_up,
)
from gxpo_trainer.compare.intervals import Interval, mean_interval, paired_bootstrap, ratio_interval


@dataclass(frozen=True, slots=True, eq=False)
class SeedGroup:
    """Runs that differ in nothing but their seed. Raises ValueError when empty or a seed comes twice."""

    name: str
    runs: tuple[RunCurves, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"group {self.name!r} has no run")
        if len({run.seed for run in self.runs}) < len(self.runs):
            raise ValueError(f"group {self.name!r} has a seed twice: {[run.seed for run in self.runs]}; drop one run")

    @property
    def by_seed(self) -> dict[int, RunCurves]:
        return {run.seed: run for run in self.runs}


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """A group at one budget, and its difference to the baseline at the same budget.

    accuracy: mean over seeds with a t-interval. over_seeds: paired difference, t-interval over seeds that
    both have. over_problems: the same mean difference, bootstrap over problems; None where per-problem
    scores are missing or of other problems. all_reached: False when a run of the two groups ended before
    the budget, so that its last evaluation stands for less than was allowed.
    """

    axis: Axis
    budget: float
    accuracy: Interval
    over_seeds: Interval | None
    over_problems: Interval | None
    all_reached: bool


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One row of the comparison.

    peak, match, speed_ups: of the mean curve; match is None when it never reaches the baseline's peak.
    num_paired: seeds shared with the baseline; num_reached: how many of those reached the peak of the
    baseline's run of the same seed. seed_speed_ups: geometric mean over these with its interval.
    """

    name: str
    seeds: tuple[int, ...]
    shutoff_steps: tuple[int | None, ...]
    final: Point
    peak: Point
    match: Point | None
    speed_ups: dict[Axis, float | None]
    num_paired: int
    num_reached: int
    seed_speed_ups: dict[Axis, Interval | None]
    budgets: tuple[BudgetResult, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that is not the same everywhere: group name → its values."""

    setting: str
    values: dict[str, tuple[str, ...]]
    hardware: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that a report or the service shows; `to_dict` makes it JSON."""

    baseline: str
    target: Point
    level: float
    smoothing: float
    groups: tuple[GroupResult, ...]
    differences: tuple[Difference, ...]

    def group(self, name: str) -> GroupResult:
        return next(group for group in self.groups if group.name == name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_groups(
    groups: Sequence[SeedGroup],
    baseline: str,
    *,
    smoothing: float = 0.0,
    budgets: Mapping[Axis, Sequence[float]] | None = None,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare every group with the one called `baseline`.

    budgets: axis → values (steps, passes, hours or tokens); by default one an axis, the largest that all
    runs got to. Raises ValueError for an unknown baseline, a name that comes twice or a bad level.
    """
    names = [group.name for group in groups]
    if baseline not in names:
        raise ValueError(f"baseline = {baseline!r} is none of the groups {names}; name one of them")
    if len(set(names)) < len(names):
        raise ValueError(f"group names {names} are not unique; rename one")
    reference = groups[names.index(baseline)]
    target = peak(mean_curve([run.curve for run in reference.runs]), smoothing)
    chosen = budgets if budgets is not None else common_budgets(groups)
    results = []
    for group in groups:
        at_budgets = [
            _at_budget(group, reference, axis, budget, smoothing, level, num_resamples, seed)
            for axis in AXES
            for budget in chosen.get(axis, ())
        ]
        row = _convergence(group, reference, target, smoothing, level)
        results.append(replace(row, budgets=tuple(found for found in at_budgets if found)))
    return Comparison(baseline, target, level, smoothing, tuple(results), tuple(find_differences(groups, baseline)))


def common_budgets(groups: Sequence[SeedGroup]) -> dict[Axis, tuple[float, ...]]:
    """The largest budget of each axis that every run got to; an axis that is unknown somewhere is left out."""
    last = {axis: [float(run.curve.cost(axis)[-1]) for group in groups for run in group.runs] for axis in AXES}
    return {axis: (min(ends),) for axis, ends in last.items() if all(math.isfinite(end) for end in ends)}


def find_differences(groups: Sequence[SeedGroup], baseline: str | None = None) -> list[Difference]:
    """Conditions and hardware in which a group differs from the baseline (by default the first group).

    Runs are held against the baseline's run of the same seed, because a seed may rightly decide something
    (generated problems); without a shared seed, the sets of values are compared. A setting that a run does
    not state counts as `unknown`.
    """
    reference = next((group for group in groups if group.name == baseline), groups[0])
    found = []
    for hardware in (False, True):
        stated = {group.name: {run.seed: _stated(run, hardware) for run in group.runs} for group in groups}
        settings = sorted({key for runs in stated.values() for values in runs.values() for key in values})
        for setting in settings:
            by_seed = {
                name: {seed: values.get(setting, "unknown") for seed, values in runs.items()}
                for name, runs in stated.items()
            }
            if any(_unequal(values, by_seed[reference.name]) for values in by_seed.values()):
                shown = {name: tuple(dict.fromkeys(values.values())) for name, values in by_seed.items()}
                found.append(Difference(setting, shown, hardware))
    return found


def _stated(run: RunCurves, hardware: bool) -> Mapping[str, str]:
    return run.hardware if hardware else run.conditions


def _unequal(values: Mapping[int, str], reference: Mapping[int, str]) -> bool:
    shared = values.keys() & reference.keys()
    if shared:
        return any(values[seed] != reference[seed] for seed in shared)
    return set(values.values()) != set(reference.values())


def _convergence(group: SeedGroup, reference: SeedGroup, target: Point, smoothing: float, level: float) -> GroupResult:
    """Cost to reach the baseline's peak, by the mean curve and seed by seed."""
    curve = mean_curve([run.curve for run in group.runs])
    match = first_reaching(curve, target.accuracy, smoothing)
    pairs = list(_pairs(group, reference))
    peaks = [peak(other.curve, smoothing) for _, other in pairs]
    matches = [first_reaching(run.curve, best.accuracy, smoothing) for (run, _), best in zip(pairs, peaks, strict=True)]
    seed_speed_ups: dict[Axis, Interval | None] = {}
    for axis in AXES:
        found = [speed_up(best, point, axis) for best, point in zip(peaks, matches, strict=True)]
        ratios = [ratio for ratio in found if ratio is not None]
        seed_speed_ups[axis] = ratio_interval(ratios, level) if ratios else None
    return GroupResult(
        name=group.name,
        seeds=tuple(run.seed for run in group.runs),
        shutoff_steps=tuple(run.gate.shutoff_step for run in group.runs),
        final=Point(float(curve.accuracy[-1]), *(float(curve.cost(axis)[-1]) for axis in AXES)),
        peak=peak(curve, smoothing),
        match=match,
        speed_ups={axis: speed_up(target, match, axis) for axis in AXES},
        num_paired=len(pairs),
        num_reached=sum(point is not None for point in matches),
        seed_speed_ups=seed_speed_ups,
        budgets=(),
    )


def _at_budget(
    group: SeedGroup,
    reference: SeedGroup,
    axis: Axis,
    budget: float,
    smoothing: float,
    level: float,
    num_resamples: int,
    seed: int,
) -> BudgetResult | None:
    """None when a run of the group has no evaluation within the budget."""
    own = [at_budget(run.curve, axis, budget, smoothing) for run in group.runs]
    points = [point for point in own if point is not None]
    if len(points) < len(own):
        return None
    others = [at_budget(run.curve, axis, budget, smoothing) for run in reference.runs]
    over_seeds = over_problems = None
    pairs = [] if group.name == reference.name else list(_pairs(group, reference))
    ends = [
        (at_budget(a.curve, axis, budget, smoothing), at_budget(b.curve, axis, budget, smoothing)) for a, b in pairs
    ]
    if pairs and all(a and b for a, b in ends):
        over_seeds = mean_interval([a.accuracy - b.accuracy for a, b in ends if a and b], level)
        first = [_problem_scores(run, a.index, smoothing) for (run, _), (a, b) in zip(pairs, ends, strict=True) if a]
        second = [_problem_scores(run, b.index, smoothing) for (_, run), (a, b) in zip(pairs, ends, strict=True) if b]
        same_problems = len({run.curve.problem_ids for pair in pairs for run in pair}) == 1
        if same_problems and all(scores is not None for scores in (*first, *second)):
            over_problems = paired_bootstrap(
                np.array(first), np.array(second), level=level, num_resamples=num_resamples, seed=seed
            )
    return BudgetResult(
        axis=axis,
        budget=float(budget),
        accuracy=mean_interval([point.accuracy for point in points], level),
        over_seeds=over_seeds,
        over_problems=over_problems,
        all_reached=all(point is not None and point.reached for point in (*own, *others)),
    )


def _problem_scores(run: RunCurves, index: int, smoothing: float) -> list[float] | None:
    """Per-problem scores at one evaluation, averaged as the accuracy is (the average is linear)."""
    if run.curve.per_problem is None:
        return None
    scores: list[float] = smooth(run.curve.per_problem[: index + 1], smoothing)[-1].tolist()
    return scores


def _pairs(group: SeedGroup, reference: SeedGroup) -> Iterable[tuple[RunCurves, RunCurves]]:
    others = reference.by_seed
    return ((run, others[run.seed]) for run in group.runs if run.seed in others)
