"""Comparison of seed groups with a baseline: the paper's Tables 2 to 4 for any runs, with intervals. Pure.

A group is one configuration run with several seeds. Tables show the mean curve over seeds; intervals come from pairing
each run with the baseline's run of the same seed, which removes the variance due to the seed. curves.py has the
definitions.

`Payoff` states when a look-ahead pays: its speed-up in time as a function of the share of a step that sampling takes.
A baseline step is 1 = s + u: sampling and verifying s, one update u = 1 − s. A candidate's step samples as much and
updates p times, p its backward passes a step. It reaches the baseline's accuracy in 1/r of the steps:

    synchronous     r (s + u) / (s + p u)
    asynchronous    r max(s, u) / max(s, p u)        sampling runs during the update
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gxpo_trainer.compare.curves import (
    AXES,
    Axis,
    BudgetPoint,
    Floats,
    Point,
    RunCurves,
    at_budget,
    first_reaching,
    mean_curve,
    peak,
    smooth,
    speed_up,
)
from gxpo_trainer.compare.intervals import Interval, mean_interval, ratio_interval, shared_bootstrap
from gxpo_trainer.compare.seeds import Difference, SeedGroup, find_differences, schedule_note
from gxpo_trainer.config.rules import rule_labels


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """A group at one budget, and its difference to the baseline at the same budget.

    accuracy: mean over seeds with a t-interval. over_seeds: paired difference with a t-interval over shared seeds.
    over_problems: the same difference, bootstrapped over problems; None if per-problem scores are missing or differ in
    their problems. all_reached: False if a run of either group ended before the budget. evaluated_from: the smallest
    cost at which an evaluation that counts was made, over the runs of both groups; 0 for an initial policy.
    """

    axis: Axis
    budget: float
    accuracy: Interval
    over_seeds: Interval | None
    over_problems: Interval | None
    all_reached: bool
    evaluated_from: float


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One seed: its peak, the peak of the baseline's run of the same seed (`target`), and where it was reached.

    target is None if the baseline lacks the seed, match if the target was not reached.
    """

    seed: int
    peak: Point
    target: Point | None
    match: Point | None
    speed_ups: dict[Axis, float | None]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One row of the comparison.

    peak, match, speed_ups: of the mean curve; match is None if it never reaches the baseline's peak. num_paired: seeds
    shared with the baseline; num_reached: those that reached the peak of the baseline's run of the same seed.
    seed_speed_ups: geometric mean over them with its interval. by_seed: results per seed.
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
    by_seed: tuple[SeedResult, ...]
    budgets: tuple[BudgetResult, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare_groups`. schedule: why and how groups were evaluated after different numbers of steps."""

    baseline: str
    target: Point
    level: float
    smoothing: float
    groups: tuple[GroupResult, ...]
    differences: tuple[Difference, ...]
    schedule: str = ""

    def group(self, name: str) -> GroupResult:
        return next(group for group in self.groups if group.name == name)


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

    budgets: axis → values (steps, passes, hours or tokens); by default one per axis, the largest that all runs
    reached. Raises ValueError for an unknown baseline, a repeated name or an invalid level.
    """
    names = [group.name for group in groups]
    if baseline not in names:
        raise ValueError(f"baseline = {baseline!r} is unknown; choose one of {names}")
    if len(set(names)) < len(names):
        raise ValueError(f"group names {names} are not unique; rename one")
    reference = groups[names.index(baseline)]
    target = peak(mean_curve([run.curve for run in reference.runs]), smoothing)
    chosen = budgets if budgets is not None else common_budgets(groups)
    wanted = [(axis, budget) for axis in AXES for budget in chosen.get(axis, ())]
    ends = {group.name: _ends(group, wanted, smoothing) for group in groups}
    pairings = [_Pairing(group, reference, smoothing, level, ends[group.name], ends[baseline]) for group in groups]
    intervals = _over_problems([pairing.differences(wanted) for pairing in pairings], level, num_resamples, seed)
    results = []
    for pairing, over_problems in zip(pairings, intervals, strict=True):
        at_budgets = (pairing.at(axis, budget, over_problems) for axis, budget in wanted)
        row = _convergence(pairing.group, reference, target, smoothing, level)
        results.append(replace(row, budgets=tuple(budget for budget in at_budgets if budget)))
    differences = tuple(find_differences(groups, baseline))
    note = schedule_note(groups, baseline)
    return Comparison(baseline, target, level, smoothing, tuple(results), differences, note)


def default_baseline(groups: Sequence[SeedGroup]) -> str:
    """Of the first baseline rule that has groups the most accurate one at the end, else the first group.

    A challenger must beat the baseline at its best setting: against a badly tuned one almost anything looks better.
    """

    def accuracy(group: SeedGroup) -> float:
        return math.fsum(run.curve.accuracy[-1] for run in group.runs) / len(group.runs)

    for label in rule_labels("baseline"):
        if baselines := [group for group in groups if group.name.startswith(label)]:
            return max(baselines, key=accuracy).name
    return groups[0].name


def common_budgets(groups: Sequence[SeedGroup]) -> dict[Axis, tuple[float, ...]]:
    """The largest budget of each axis that every run reached, without axes that are unknown in a run."""
    last = {axis: [float(run.curve.cost(axis)[-1]) for group in groups for run in group.runs] for axis in AXES}
    return {axis: (min(ends),) for axis, ends in last.items() if all(math.isfinite(end) for end in ends)}


def spread_budgets(groups: Sequence[SeedGroup], num: Mapping[Axis, int]) -> dict[Axis, tuple[float, ...]]:
    """`num` evenly spaced budgets per axis up to the largest common one; whole numbers except for hours."""
    spread: dict[Axis, tuple[float, ...]] = {}
    for axis, (largest,) in common_budgets(groups).items():
        if axis in num:
            parts = [largest * part / num[axis] for part in range(1, num[axis])]
            values = parts if axis == "hours" else [float(round(value)) for value in parts]
            spread[axis] = tuple(dict.fromkeys([*(value for value in values if 0 < value < largest), largest]))
    return spread


def _convergence(group: SeedGroup, reference: SeedGroup, target: Point, smoothing: float, level: float) -> GroupResult:
    """Cost to reach the baseline's peak, of the mean curve and per seed."""
    curve = mean_curve([run.curve for run in group.runs])
    match = first_reaching(curve, target.accuracy, smoothing)
    seeds = tuple(_seed_result(run, reference.by_seed.get(run.seed), smoothing) for run in group.runs)
    seed_speed_ups: dict[Axis, Interval | None] = {}
    for axis in AXES:
        ratios = [ratio for seed in seeds if (ratio := seed.speed_ups[axis]) is not None]
        seed_speed_ups[axis] = ratio_interval(ratios, level) if ratios else None
    return GroupResult(
        name=group.name,
        seeds=tuple(run.seed for run in group.runs),
        shutoff_steps=tuple(run.gate.shutoff_step for run in group.runs),
        final=curve.point(-1, curve.accuracy[-1]),
        peak=peak(curve, smoothing),
        match=match,
        speed_ups={axis: speed_up(target, match, axis) for axis in AXES},
        num_paired=sum(seed.target is not None for seed in seeds),
        num_reached=sum(seed.match is not None for seed in seeds),
        seed_speed_ups=seed_speed_ups,
        by_seed=seeds,
        budgets=(),
    )


def _seed_result(run: RunCurves, other: RunCurves | None, smoothing: float) -> SeedResult:
    best = peak(run.curve, smoothing)
    if other is None:
        return SeedResult(run.seed, best, None, None, dict.fromkeys(AXES))
    target = peak(other.curve, smoothing)
    match = first_reaching(run.curve, target.accuracy, smoothing)
    return SeedResult(run.seed, best, target, match, {axis: speed_up(target, match, axis) for axis in AXES})


Ends = dict[tuple[Axis, float], dict[int, BudgetPoint | None]]
"""The evaluation that counts at each budget, by seed."""


def _ends(group: SeedGroup, budgets: Sequence[tuple[Axis, float]], smoothing: float) -> Ends:
    return {
        (axis, budget): {run.seed: at_budget(run.curve, axis, budget, smoothing) for run in group.runs}
        for axis, budget in budgets
    }


Indices = tuple[tuple[int, int], ...]
"""Evaluation indices of each pair of runs: of the group's run and of the baseline's run of the same seed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pairing:
    """A group against the baseline at several budgets."""

    group: SeedGroup
    reference: SeedGroup
    smoothing: float
    level: float
    ends: Ends
    reference_ends: Ends

    def at(self, axis: Axis, budget: float, over_problems: Mapping[Indices, Interval]) -> BudgetResult | None:
        """Result at a budget, None if a run of the group has no evaluation within it."""
        own = self.ends[axis, budget].values()
        points = [point for point in own if point is not None]
        if len(points) < len(own):
            return None
        others = self.reference_ends[axis, budget].values()
        pairs = self._points(axis, budget)
        return BudgetResult(
            axis=axis,
            budget=float(budget),
            accuracy=mean_interval([point.accuracy for point in points], self.level),
            over_seeds=mean_interval([a.accuracy - b.accuracy for a, b in pairs], self.level) if pairs else None,
            over_problems=over_problems.get(_indices(pairs)),
            all_reached=all(point is not None and point.reached for point in (*own, *others)),
            evaluated_from=min(point.spent for point in (*own, *others) if point is not None),
        )

    def differences(self, budgets: Sequence[tuple[Axis, float]]) -> dict[Indices, Floats]:
        """Mean difference per problem, [num_problems], by the evaluations that count at the budgets.

        Several budgets may share them. Empty if per-problem scores are missing or differ in their problems.
        """
        pairs = self._pairs()
        if len({run.curve.problem_ids for pair in pairs for run in pair}) > 1:
            return {}
        differences: dict[Indices, Floats] = {}
        for indices in {_indices(self._points(axis, budget)) for axis, budget in budgets}:
            rows = []
            for (run, other), (index, other_index) in zip(pairs, indices, strict=False):
                own, reference = self._scores(run, index), self._scores(other, other_index)
                if own is not None and reference is not None:
                    rows.append(own - reference)
            if rows and len(rows) == len(pairs):
                differences[indices] = np.mean(rows, axis=0)
        return differences

    def _points(self, axis: Axis, budget: float) -> list[tuple[BudgetPoint, BudgetPoint]]:
        """Both runs of each pair at a budget; empty unless all have an evaluation within it."""
        pairs = self._pairs()
        ends, others = self.ends[axis, budget], self.reference_ends[axis, budget]
        points = [(a, b) for run, _ in pairs if (a := ends[run.seed]) and (b := others[run.seed])]
        return points if len(points) == len(pairs) else []

    def _pairs(self) -> list[tuple[RunCurves, RunCurves]]:
        if self.group.name == self.reference.name:
            return []
        others = self.reference.by_seed
        return [(run, others[run.seed]) for run in self.group.runs if run.seed in others]

    def _scores(self, run: RunCurves, index: int) -> Floats | None:
        """Per-problem scores at one evaluation, smoothed like the accuracy."""
        if run.curve.per_problem is None:
            return None
        scores: Floats = run.curve.per_problem[index]
        return scores if self.smoothing == 0 else smooth(run.curve.per_problem[: index + 1], self.smoothing)[-1]


def _indices(pairs: Sequence[tuple[BudgetPoint, BudgetPoint]]) -> Indices:
    return tuple((a.index, b.index) for a, b in pairs)


def _over_problems(
    wanted: Sequence[Mapping[Indices, Floats]], level: float, num_resamples: int, seed: int
) -> list[dict[Indices, Interval]]:
    """An interval over problems for each difference; differences of equal length share their resamples."""
    by_length: dict[int, list[tuple[int, Indices]]] = {}
    for number, differences in enumerate(wanted):
        for indices, difference in differences.items():
            by_length.setdefault(difference.size, []).append((number, indices))
    results: list[dict[Indices, Interval]] = [{} for _ in wanted]
    for keys in by_length.values():
        rows = np.stack([wanted[number][indices] for number, indices in keys])
        intervals = shared_bootstrap(rows, level=level, num_resamples=num_resamples, seed=seed)
        for (number, indices), interval in zip(keys, intervals, strict=True):
            results[number][indices] = interval
    return results


SHARES = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares that tables show."""


@dataclass(frozen=True, slots=True)
class Payoff:
    """A candidate against a baseline.

    steps: speed-up in steps, with its interval over seeds. passes: backward passes of a candidate's step, in those of
    the baseline's.
    """

    steps: Interval
    passes: float

    def speed_up(self, share: float, *, asynchronous: bool = False) -> Interval:
        """Speed-up in time at a sampling share in [0, 1). Raises ValueError outside."""
        if not 0 <= share < 1:
            raise ValueError(f"sampling share {share} is out of range; set it in [0, 1)")
        update = 1 - share
        if asynchronous:
            factor = max(share, update) / max(share, self.passes * update)
        else:
            factor = 1 / (share + self.passes * update)
        low, high = (None if bound is None else bound * factor for bound in (self.steps.low, self.steps.high))
        return Interval(self.steps.mean * factor, low, high, self.steps.num)

    @property
    def break_even(self) -> Interval:
        """The synchronous sampling share above which the candidate is faster: (p − r)/(p − 1).

        Below 0 it always is, above 1 never. Its bounds are those of r, reversed. Raises ValueError for p = 1, whose
        speed-up does not depend on the share.
        """
        if self.passes == 1:
            raise ValueError("a candidate with the baseline's passes has no break-even share")

        def share(ratio: float | None) -> float | None:
            return None if ratio is None else (self.passes - ratio) / (self.passes - 1)

        mean = share(self.steps.mean)
        assert mean is not None
        return Interval(mean, share(self.steps.high), share(self.steps.low), self.steps.num)


def payoff_of(group: GroupResult, baseline: GroupResult) -> Payoff | None:
    """The payoff of a group; None unless every shared seed reached the baseline's peak."""
    ratio = group.seed_speed_ups["steps"]
    if ratio is None or group.num_reached < group.num_paired or group.name == baseline.name:
        return None
    own, reference = (result.final.backward_passes / result.final.steps for result in (group, baseline))
    return Payoff(ratio, own / reference)
