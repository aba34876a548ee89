"""Comparison of seed groups with a baseline: the paper's Tables 2 to 4 for any runs, with intervals. Pure.

A group is one configuration run with several seeds. Tables show the mean curve over seeds; intervals come from pairing
each run with the baseline's run of the same seed. curves.py has the definitions.

Costs to reach an accuracy are those of evaluations on the common grid of batches, or of backward passes, so that a run
that is evaluated more often gains nothing by it; without a common grid every run's own evaluations count.

`time_speed_up` is the speed-up in time as a function of the share of a step that sampling takes. A baseline step is
1 = s + u: sampling and verifying s, updating u = 1 − s. A candidate that reaches the baseline's accuracy in 1/r of the
steps and 1/q of the backward passes spends s/r on sampling and u/q on updates:

    synchronous     1 / (s / r + u / q)
    asynchronous    max(s, u) / max(s / r, u / q)        sampling runs during the update

Passes count up to that accuracy, not to the end: a gate may switch the look-ahead off later.

No break-even share follows from runs: it would need both sides tuned for speed, of which a run does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gxpo_trainer.compare.curves import (
    AXES,
    GRID_OF,
    NEAR,
    PLATEAU,
    SAME,
    Axis,
    BudgetPoint,
    EvaluationCurve,
    Point,
    RunCurves,
    at_budget,
    common_grid,
    crossing,
    first_reaching,
    in_plateau,
    interpolated,
    on_grid,
    peak,
)
from gxpo_trainer.compare.intervals import (
    LEVEL,
    MARGIN,
    Contrast,
    Floats,
    Interval,
    contrast,
    corrected,
    mean_interval,
    p_of_mean,
    ratio_interval,
)
from gxpo_trainer.compare.seeds import Difference, SeedGroup, find_differences, schedule_note
from gxpo_trainer.config.rules import RULE_CHOICE

Grids = Mapping[Axis, Floats | None]
CostOf = Callable[[EvaluationCurve, float, Axis, npt.NDArray[np.bool_]], float | None]


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """A group at one budget, and its difference to the baseline at the same budget.

    accuracy: mean over seeds with a t-interval. over_seeds: paired difference with a t-interval over shared seeds.
    over_problems: the same difference over problems, conditional on these seeds; None if per-problem scores are missing
    or differ in their problems. all_reached: False if a run of either group ended before the budget. evaluated_from:
    smallest cost at which an evaluation that counts was made, over the runs of both groups; 0 for an initial policy.
    p_value: of the paired t-test over seeds, uncorrected; None without a spread.
    """

    axis: Axis
    budget: float
    accuracy: Interval
    over_seeds: Interval | None
    over_problems: Interval | None
    all_reached: bool
    evaluated_from: float
    p_value: float | None = None


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One seed: its last evaluation and its peak, the peak of the baseline's run of the same seed (`target`), and where
    it was reached.

    target is None if the baseline lacks the seed, match if the target was not reached. counted: the evaluations of the
    common grid of steps that stand for target and match there; None where there are none.
    """

    seed: int
    final: Point
    peak: Point
    target: Point | None
    match: Point | None
    counted: tuple[Point, Point] | None
    speed_ups: dict[Axis, float | None]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One row of the comparison.

    peak, match, speed_ups: of the mean curve; match is None if it never reaches the baseline's peak. Speed-ups are
    taken on the common grids, and are None where the curve does not reach the peak there. plateau: against the
    baseline, over the last share of the common budget of backward passes, corrected by Holm over the groups; None
    without it. at_equal_passes: at that budget itself; None unless all
    runs of the group and the baseline have an evaluation within it that is not the initial policy's.
    num_paired: seeds shared with the baseline; num_reached: those that reached the peak of the baseline's run of the
    same seed. seed_speed_ups: geometric mean over them with its interval. by_seed: results per seed.
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
    plateau: Contrast | None = None
    at_equal_passes: BudgetResult | None = None

    @property
    def unshared(self) -> bool:
        """Whether its seeds share the initial policy's evaluation alone, so that the mean curve tells no cost."""
        return not self.final.steps and all(seed.final.steps for seed in self.by_seed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare_groups`. schedule: the `schedule_note` of its groups."""

    baseline: str
    target: Point
    level: float
    groups: tuple[GroupResult, ...]
    differences: tuple[Difference, ...]
    schedule: str

    def group(self, name: str) -> GroupResult:
        return next(group for group in self.groups if group.name == name)

    @property
    def ranking(self) -> list[GroupResult]:
        """The groups by their accuracy at the largest common budget of backward passes, those without one last."""
        return sorted(
            self.groups, key=lambda group: -group.at_equal_passes.accuracy.mean if group.at_equal_passes else 1
        )


def compare_groups(
    groups: Sequence[SeedGroup],
    baseline: str,
    *,
    budgets: Mapping[Axis, Sequence[float]] | None = None,
) -> Comparison:
    """Compare every group with the one called `baseline`.

    budgets: axis → values (steps, passes, hours, tokens or token-passes); by default one per axis, of `common_budgets`.
    Raises DataError where the seeds of a group have no evaluation in common.
    """
    reference = {group.name: group for group in groups}[baseline]
    grids = common_grids(groups)
    target = peak(reference.mean)
    common = common_budgets(groups)
    chosen = budgets if budgets is not None else common
    wanted = [(axis, budget) for axis in AXES for budget in chosen.get(axis, ())]
    (passes,) = common.get("backward_passes", (None,))
    raw = plateau_contrasts(groups, reference, passes) if passes is not None else {}
    against = dict(zip(raw, corrected(list(raw.values()), len(groups) - 1), strict=True))
    results = []
    for group in groups:
        at_budgets = (_at_budget(group, reference, axis, budget) for axis, budget in wanted)
        equal = None if passes is None else _at_budget(group, reference, "backward_passes", passes)
        results.append(
            replace(
                _convergence(group, reference, target, grids),
                budgets=tuple(result for result in at_budgets if result is not None),
                plateau=against.get(group.name),
                at_equal_passes=equal if equal is not None and equal.evaluated_from > 0 else None,
            )
        )
    differences = tuple(find_differences(groups, baseline))
    return Comparison(baseline, target, LEVEL, tuple(results), differences, schedule_note(groups, reference))


def plateau_contrasts(
    groups: Sequence[SeedGroup], reference: SeedGroup, budget: float, window: float = PLATEAU, margin: float = MARGIN
) -> dict[str, Contrast]:
    """Plateaus against that of the reference, by group, not corrected yet; without those that lack one.

    budget: backward passes of which the last share `window` counts, at the evaluations that both groups share.
    """
    contrasts: dict[str, Contrast] = {}
    for group in groups:
        if group.name == reference.name:
            continue
        grid = common_grid([run.curve for run in (*group.runs, *reference.runs)], "backward_passes")
        values, own = (plateaus(one, budget, window, grid) for one in (group, reference))
        if values and own and (compared := contrast(values, own, margin)):
            pairs = [(run, reference.by_seed[run.seed]) for run in group.runs if run.seed in own]
            scores = [tuple(_plateau_scores(run.curve, budget, window, grid) for run in pair) for pair in pairs]
            contrasts[group.name] = replace(compared, over_problems=_over_problems(pairs, scores))
    return contrasts


def plateaus(group: SeedGroup, budget: float, window: float, grid: Floats | None = None) -> dict[int, float] | None:
    """Plateau by seed, of the evaluations on a grid of passes if given; None unless every run has one in it."""
    inside = {run.seed: in_plateau(run.curve, budget, window, grid) for run in group.runs}
    if not all(kept.any() for kept in inside.values()):
        return None
    return {run.seed: float(run.curve.accuracy[inside[run.seed]].mean()) for run in group.runs}


def _plateau_scores(curve: EvaluationCurve, budget: float, window: float, grid: Floats) -> Floats | None:
    kept, scores = in_plateau(curve, budget, window, grid), curve.per_problem
    return None if scores is None else np.asarray(scores[kept].mean(axis=0), dtype=np.float64)


def best_plateau(groups: Sequence[SeedGroup], budget: float, window: float = PLATEAU) -> float:
    """Highest mean plateau of a group; NaN if none has one."""
    means = [float(np.mean([*values.values()])) for g in groups if (values := plateaus(g, budget, window))]
    return max(means, default=math.nan)


@dataclass(frozen=True, slots=True)
class Reach:
    """Speed-up of a group to an accuracy: the baseline's cost over its own, geometric mean over shared seeds.

    first: by the first crossing on the common grid; None for costs that have no grid of their own. interpolated: on the
    monotone curve through the same evaluations. Each is None unless every shared seed got there. p_value: of the
    logarithms of the interpolated ones. costs: the baseline's own, means of both kinds.
    """

    axis: Axis
    target: float
    first: Interval | None
    interpolated: Interval | None
    p_value: float | None
    costs: tuple[float | None, float | None]


def sweep(group: SeedGroup, reference: SeedGroup, targets: Sequence[float], grids: Grids, axis: Axis) -> list[Reach]:
    """A Reach for each target, an accuracy."""
    on = GRID_OF[axis]
    shared = [(run.curve, reference.by_seed[run.seed].curve) for run in group.runs if run.seed in reference.by_seed]
    pairs = [[(curve, on_grid(curve, on, grids[on])) for curve in pair] for pair in shared]

    def costs(cost: CostOf, target: float) -> list[list[float]]:
        """Own cost and the baseline's by shared seed; empty unless every seed got there, after the start."""
        both = [[cost(curve, target, axis, counted) for curve, counted in pair] for pair in pairs]
        known = [[c for c in pair if c] for pair in both]
        return known if all(len(pair) == 2 for pair in known) else []

    reaches = []
    for target in targets:
        first, between = costs(crossing, target) if on == axis else [], costs(interpolated, target)
        ratios = [[other / own for own, other in known] for known in (first, between)]
        intervals = [ratio_interval(values) if values else None for values in ratios]
        p_value = p_of_mean([math.log(ratio) for ratio in ratios[1]])
        means = [float(np.mean([other for _, other in known])) if known else None for known in (first, between)]
        reaches.append(Reach(axis, target, intervals[0], intervals[1], p_value, (means[0], means[1])))
    return reaches


def default_baseline(groups: Sequence[SeedGroup]) -> str:
    """Of the first baseline rule that has groups the most accurate one at the end, else the first group.

    A challenger must beat the baseline at its best setting: against a badly tuned one almost anything looks better.
    """
    known = sorted(RULE_CHOICE.known(), key=lambda rule: -len(rule.label))  # `GRPO Momentum` before `GRPO`
    labels = [next((r.label for r in known if f"{g.runs[0].rule} ".startswith(f"{r.label} ")), "") for g in groups]
    for rule in RULE_CHOICE.known():
        baselines = [group for group, label in zip(groups, labels, strict=True) if label == rule.label]
        if rule.family == "baseline" and baselines:
            return max(baselines, key=lambda group: np.mean([run.curve.accuracy[-1] for run in group.runs])).name
    return groups[0].name


def common_budgets(groups: Sequence[SeedGroup]) -> dict[Axis, tuple[float, ...]]:
    """The largest budget of each axis that every trained run reached, without axes that are unknown in one.

    On a common grid it is a point of it: between two points the last evaluation favours a run with more of them. That
    is unless all runs were evaluated much later than at its last point, which their schedules then share by chance.
    """
    curves = _trained(groups)
    last = {axis: min(float(curve.cost(axis)[-1]) for curve in curves) for axis in AXES}
    for axis, grid in common_grids(groups).items():
        spent = min(point.spent if (point := at_budget(curve, axis, last[axis])) else 0.0 for curve in curves)
        if grid is not None and (near := grid[(grid > 0) & (grid >= NEAR * spent) & (grid <= last[axis] + SAME)]).size:
            last[axis] = float(near[-1])
    known = [axis for axis in AXES if all(math.isfinite(curve.cost(axis)[-1]) for curve in curves)]
    return {axis: (last[axis],) for axis in known}


def common_grids(groups: Sequence[SeedGroup]) -> dict[Axis, Floats | None]:
    """The common grid of steps and of backward passes; None where a trained run has no point of it after the start."""
    curves = _trained(groups)
    grids: dict[Axis, Floats | None] = {}
    for axis in dict.fromkeys(GRID_OF.values()):
        grid = common_grid(curves, axis)
        grids[axis] = grid if all((on_grid(c, axis, grid) & (c.cost(axis) > 0)).any() for c in curves) else None
    return grids


def _trained(groups: Sequence[SeedGroup]) -> list[EvaluationCurve]:
    """Curves with an evaluation after the start, or all if none has: a run that ends before it, as a diverged one may,
    must not decide where the others are compared."""
    curves = [run.curve for group in groups for run in group.runs]
    return [curve for curve in curves if curve.steps[-1] > 0] or curves


def _counted(
    baseline: EvaluationCurve, curve: EvaluationCurve, target: Point, grids: Grids
) -> dict[Axis, tuple[Point, Point] | None]:
    """On each common grid the evaluations that stand for the baseline's peak and for reaching it; a peak between two
    points of a grid has the cost of the next."""
    counted: dict[Axis, tuple[Point, Point] | None] = {}
    for on, grid in grids.items():
        other = np.flatnonzero(on_grid(baseline, on, grid) & (baseline.steps >= target.steps))
        own = first_reaching(curve, target.accuracy, on_grid(curve, on, grid))
        counted[on] = (baseline.point(other[0]), own) if other.size and own else None
    return counted


def _speed_ups(counted: Mapping[Axis, tuple[Point, Point] | None]) -> dict[Axis, float | None]:
    """Cost of the baseline's peak over that of reaching it."""
    return {axis: _ratio(counted[GRID_OF[axis]], axis) for axis in AXES}


def _ratio(pair: tuple[Point, Point] | None, axis: Axis) -> float | None:
    other, own = (point.cost(axis) for point in pair) if pair else (math.nan, math.nan)
    return other / own if 0 < other < math.inf and 0 < own < math.inf else None


def _convergence(group: SeedGroup, reference: SeedGroup, target: Point, grids: Grids) -> GroupResult:
    """Cost to reach the baseline's peak, of the mean curve and per seed."""
    curve = group.mean
    seeds = tuple(_seed_result(run, reference.by_seed.get(run.seed), grids) for run in group.runs)
    seed_speed_ups: dict[Axis, Interval | None] = {}
    for axis in AXES:
        ratios = [ratio for seed in seeds if (ratio := seed.speed_ups[axis]) is not None]
        seed_speed_ups[axis] = ratio_interval(ratios) if ratios else None
    return GroupResult(
        name=group.name,
        seeds=tuple(run.seed for run in group.runs),
        shutoff_steps=tuple(run.gate.shutoff_step for run in group.runs),
        final=curve.point(-1),
        peak=peak(curve),
        match=first_reaching(curve, target.accuracy),
        speed_ups=_speed_ups(_counted(reference.mean, curve, target, grids)),
        num_paired=sum(seed.target is not None for seed in seeds),
        num_reached=sum(seed.match is not None for seed in seeds),
        seed_speed_ups=seed_speed_ups,
        by_seed=seeds,
        budgets=(),
    )


def _seed_result(run: RunCurves, other: RunCurves | None, grids: Grids) -> SeedResult:
    final, best = run.curve.point(-1), peak(run.curve)
    if other is None:
        return SeedResult(run.seed, final, best, None, None, None, dict.fromkeys(AXES))
    target = peak(other.curve)
    match = first_reaching(run.curve, target.accuracy)
    counted = _counted(other.curve, run.curve, target, grids)
    return SeedResult(run.seed, final, best, target, match, counted["steps"], _speed_ups(counted))


def _at_budget(group: SeedGroup, reference: SeedGroup, axis: Axis, budget: float) -> BudgetResult | None:
    """Result at a budget, None if a run of the group has no evaluation within it."""
    ends, others = ({r.seed: at_budget(r.curve, axis, budget) for r in g.runs} for g in (group, reference))
    points = [point for point in ends.values() if point is not None]
    if len(points) < len(ends):
        return None
    pairs = [(run, reference.by_seed[run.seed]) for run in group.runs if run.seed in others]
    matched = [(a, b) for run, _ in pairs if (a := ends[run.seed]) and (b := others[run.seed])]
    if group.name == reference.name or len(matched) < len(pairs):
        pairs, matched = [], []
    scores = [(_scores(run, a), _scores(other, b)) for (run, other), (a, b) in zip(pairs, matched, strict=True)]
    differences = [a.accuracy - b.accuracy for a, b in matched]
    return BudgetResult(
        axis=axis,
        budget=float(budget),
        accuracy=mean_interval([point.accuracy for point in points]),
        over_seeds=mean_interval(differences) if differences else None,
        over_problems=_over_problems(pairs, scores),
        all_reached=all(point is not None and point.reached for point in (*points, *others.values())),
        evaluated_from=min(point.spent for point in (*points, *others.values()) if point is not None),
        p_value=p_of_mean(differences),
    )


def _scores(run: RunCurves, point: BudgetPoint) -> Floats | None:
    """Per-problem scores of an evaluation."""
    return None if run.curve.per_problem is None else run.curve.per_problem[point.index]


def _over_problems(
    pairs: Sequence[tuple[RunCurves, RunCurves]], scores: Sequence[tuple[Floats | None, ...]]
) -> Interval | None:
    """Mean difference over problems, each averaged over the pairs; None unless all runs have the same problems.

    Without bounds where no problem differs from another, as with two policies that solve none: a t-interval would have
    no width.
    """
    known = [(own, other) for own, other in scores if own is not None and other is not None]
    if not known or len(known) < len(pairs) or len({run.curve.problem_ids for pair in pairs for run in pair}) > 1:
        return None
    differences = np.mean([own - other for own, other in known], axis=0)
    interval = mean_interval(differences)
    return interval if np.ptp(differences) > SAME else replace(interval, low=None, high=None)


def payoff_of(group: GroupResult, share: float, *, asynchronous: bool = False) -> Interval | None:
    """Speed-up in time at a sampling share in [0, 1), over seeds; None unless every shared seed reached the baseline's
    peak at a known cost."""
    counted = [seed.counted for seed in group.by_seed if seed.target is not None]
    ratios = [(_ratio(pair, "steps"), _ratio(pair, "backward_passes")) for pair in counted]
    times = [time_speed_up(r, q, share, asynchronous=asynchronous) for r, q in ratios if r and q]
    return ratio_interval(times) if times and len(times) == len(counted) else None


def passes_per_step(group: GroupResult) -> float:
    """Backward passes of a step until the baseline's peak is reached, in those of the baseline's steps."""
    pairs = zip(*(seed.counted for seed in group.by_seed if seed.counted), strict=True)
    other, own = (sum(p.backward_passes for p in points) / sum(p.steps for p in points) for points in pairs)
    return float(own / other)


def time_speed_up(steps: float, passes: float, share: float, *, asynchronous: bool = False) -> float:
    """Speed-up in time at a sampling share, from those in steps and in backward passes."""
    update = 1 - share
    if asynchronous:
        return max(share, update) / max(share / steps, update / passes)
    return 1 / (share / steps + update / passes)
