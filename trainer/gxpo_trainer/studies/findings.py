"""The findings of a study: every figure of its report, with intervals over seeds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from gxpo_trainer.compare.curves import Axis, Floats, RunCurves, at_budget, crossing
from gxpo_trainer.compare.groups import Payoff, compare_groups
from gxpo_trainer.compare.intervals import (
    Interval,
    detectable_difference,
    holm,
    mean_interval,
    paired_p_value,
    ratio_interval,
    shared_bootstrap,
)
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.jsonl import Row
from gxpo_trainer.studies.data import MEDIANS, StudyData, key_of

COLLAPSED = 0.5
"""A run whose last accuracy is below this share of its peak has collapsed."""


@dataclass(frozen=True, slots=True)
class EqualCost:
    """An arm against the baseline at a cost at which all their runs were evaluated.

    accuracy, baseline: means over seeds. difference: paired by seed. over_problems: the same mean difference,
    bootstrapped over problems. p_value: of the paired t-test; adjusted: after Holm over all comparisons on this axis.
    detectable: the smallest difference that so many seeds show with 80% probability.
    """

    axis: Axis
    cost: float
    accuracy: Interval
    baseline: Interval
    difference: Interval
    over_problems: Interval | None
    p_value: float | None
    detectable: float | None
    adjusted: float | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Speed-up to an accuracy over the baseline's run of the same seed.

    accuracy: None for the peak of that run. reached: seeds whose run, and that of the baseline, reached it. steps,
    passes: geometric means over those; None without one.
    """

    accuracy: float | None
    reached: int
    steps: Interval | None
    passes: Interval | None


@dataclass(frozen=True, slots=True)
class ArmFindings:
    """One arm. final: accuracy at the end of the budget. ladder: (rate, mean accuracy over its seeds, diverged).

    passes, steps: against the baseline at equal costs, ascending: those of `compare_at` and the end for passes, the end
    for steps; empty for the baseline and without a common evaluation. matches: to the baseline's peak, and to the
    study's target. payoff: by the last of these; None unless all seeds reached it.
    medians: of the diagnostics, over seeds.
    """

    arm: str
    label: str
    learning_rate: float
    seeds: tuple[int, ...]
    final: Interval
    ladder: tuple[tuple[float, float, bool], ...]
    at_end_of_ladder: bool
    collapsed: int
    diverged: int
    passes: tuple[EqualCost, ...]
    steps: tuple[EqualCost, ...]
    matches: tuple[Match, ...]
    payoff: Payoff | None
    medians: dict[str, float]


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """Accuracy of weights extrapolated from a checkpoint of an arm, against that checkpoint and the step it points at.

    before, after: accuracy at `step` and at `target` = factor × step. gained: extrapolated − before; missed:
    extrapolated − after; both paired by seed.
    """

    label: str
    step: int
    target: float
    before: Interval
    extrapolated: Interval
    after: Interval
    gained: Interval
    missed: Interval


@dataclass(frozen=True, slots=True)
class Findings:
    """arms: those with all reported seeds, the baseline first. missing: labels of the others. sampling_share: the
    measured share of a baseline's step that sampling and verifying take. extrapolated: None before all seeds."""

    baseline: ArmFindings
    arms: tuple[ArmFindings, ...]
    missing: tuple[str, ...]
    sampling_share: float
    extrapolated: Extrapolated | None

    @property
    def candidates(self) -> list[ArmFindings]:
        return [arm for arm in self.arms if arm.arm != self.baseline.arm]


def find(data: StudyData) -> Findings | None:
    """The findings; None before the baseline has all its seeds."""
    study = data.study
    groups = {arm: group for arm in study.arms if (group := data.group(arm)) and len(group.runs) == len(study.seeds)}
    if study.baseline not in groups:
        return None
    order = [study.baseline, *(arm for arm in groups if arm != study.baseline)]
    arms = [_arm(data, arm, groups[arm], groups[study.baseline]) for arm in order]
    passes, steps = _adjusted([arm.passes for arm in arms]), _adjusted([arm.steps for arm in arms])
    arms = [replace(arm, passes=p, steps=s) for arm, p, s in zip(arms, passes, steps, strict=True)]
    missing = tuple(study.arms[arm].label for arm in study.arms if arm not in groups)
    rows = data.reported(study.baseline)
    share = sum(row["rollout_s"] + row["verify_s"] for row in rows) / sum(row["training_s"] for row in rows)
    return Findings(arms[0], tuple(arms), missing, float(share), _extrapolated(data))


def equal_costs(
    group: SeedGroup, baseline: SeedGroup, axis: Axis, requested: Sequence[float] = ()
) -> tuple[EqualCost, ...]:
    """See EqualCost: at the largest cost at which all runs were evaluated, and at those of `requested` where they were.

    Empty without such a cost above 0.
    """
    shared = set.intersection(*(set(run.curve.cost(axis).tolist()) for run in (*group.runs, *baseline.runs)))
    costs = {max(shared, default=0.0), *(shared & {float(cost) for cost in requested})} - {0.0}
    return tuple(_equal_cost(group, baseline, axis, cost) for cost in sorted(costs))


def _equal_cost(group: SeedGroup, baseline: SeedGroup, axis: Axis, cost: float) -> EqualCost:
    pairs = [(run, baseline.by_seed[run.seed]) for run in group.runs if run.seed in baseline.by_seed]
    differences = [_accuracy(run, axis, cost) - _accuracy(other, axis, cost) for run, other in pairs]
    return EqualCost(
        axis,
        cost,
        mean_interval([_accuracy(run, axis, cost) for run in group.runs]),
        mean_interval([_accuracy(run, axis, cost) for run in baseline.runs]),
        mean_interval(differences),
        _over_problems(pairs, axis, cost),
        paired_p_value(differences),
        detectable_difference(differences),
    )


def _arm(data: StudyData, arm: str, group: SeedGroup, baseline: SeedGroup) -> ArmFindings:
    rows = data.reported(arm)
    is_baseline = group.name == baseline.name
    compared = compare_groups([baseline] if is_baseline else [baseline, group], baseline.name, budgets={})
    result = compared.group(group.name)
    peak = Match(None, result.num_reached, result.seed_speed_ups["steps"], result.seed_speed_ups["backward_passes"])
    target = data.study.target
    matches = (peak,) if target is None else (peak, _match(group, baseline, target))
    ratio = matches[-1].steps if matches[-1].reached == len(result.seeds) and not is_baseline else None
    ladder = _ladder(data, arm)
    rate = float(rows[0]["learning_rate"])
    per_step = float(sum(row["backward_passes"] for row in rows) / sum(row["steps"] for row in rows))
    medians = {name: [row[name] for row in rows if row[name] is not None] for name in MEDIANS}
    return ArmFindings(
        arm=arm,
        label=group.name,
        learning_rate=rate,
        seeds=result.seeds,
        final=mean_interval([float(row["accuracy"]) for row in rows]),
        ladder=ladder,
        at_end_of_ladder=bool(ladder) and rate == ladder[-1][0],
        collapsed=sum(row["accuracy"] < COLLAPSED * row["peak"] for row in rows),
        diverged=sum(row["diverged"] for row in rows),
        passes=() if is_baseline else equal_costs(group, baseline, "backward_passes", data.study.compare_at),
        steps=() if is_baseline else equal_costs(group, baseline, "steps"),
        matches=matches,
        payoff=None if ratio is None else Payoff(ratio, per_step),
        medians={name: median(values) for name, values in medians.items() if values},
    )


def _match(group: SeedGroup, baseline: SeedGroup, accuracy: float) -> Match:
    """Costs on the line between evaluations, for arms are evaluated at steps of different length."""
    ratios: dict[Axis, list[float]] = {"steps": [], "backward_passes": []}
    for run in group.runs:
        reference = baseline.by_seed[run.seed]
        for axis, values in ratios.items():
            own, other = (crossing(curve, accuracy, axis) for curve in (run.curve, reference.curve))
            if own and other:
                values.append(other / own)
    steps, passes = (ratio_interval(values) if values else None for values in ratios.values())
    return Match(accuracy, len(ratios["steps"]), steps, passes)


def _extrapolated(data: StudyData) -> Extrapolated | None:
    plan = data.study.extrapolation
    rows = [] if plan is None else [r for r in data.runs if r["stage"] == "extrapolation" and r["arm"] == plan.arm]
    if plan is None or len(rows) < len(data.study.seeds):
        return None
    target = plan.factor * plan.step
    reached = {row["seed"]: float(row["accuracy"]) for row in rows}
    runs = [data.curves[replace(key_of(row), stage="report")] for row in rows]
    before, after = ([_accuracy(run, "steps", step) for run in runs] for step in (plan.step, target))
    values = [reached[run.seed] for run in runs]
    return Extrapolated(
        data.study.arms[plan.arm].label,
        plan.step,
        target,
        mean_interval(before),
        mean_interval(values),
        mean_interval(after),
        mean_interval([value - other for value, other in zip(values, before, strict=True)]),
        mean_interval([value - other for value, other in zip(values, after, strict=True)]),
    )


def _adjusted(by_arm: Sequence[tuple[EqualCost, ...]]) -> list[tuple[EqualCost, ...]]:
    """The comparisons of all arms with Holm's correction over all of them."""
    adjusted = iter(holm([cost.p_value for costs in by_arm for cost in costs if cost.p_value is not None]))
    return [
        tuple(cost if cost.p_value is None else replace(cost, adjusted=next(adjusted)) for cost in costs)
        for costs in by_arm
    ]


def _ladder(data: StudyData, arm: str) -> tuple[tuple[float, float, bool], ...]:
    by_rate: dict[float, list[Row]] = {}
    for row in data.runs:
        if row["stage"] == "ladder" and row["arm"] == arm:
            by_rate.setdefault(float(row["learning_rate"]), []).append(row)
    return tuple(
        (rate, fmean(row["accuracy"] for row in rows), any(row["diverged"] for row in rows))
        for rate, rows in sorted(by_rate.items())
    )


def _accuracy(run: RunCurves, axis: Axis, cost: float) -> float:
    point = at_budget(run.curve, axis, cost)
    assert point is not None
    return point.accuracy


def _over_problems(pairs: Sequence[tuple[RunCurves, RunCurves]], axis: Axis, cost: float) -> Interval | None:
    """Mean over seeds of the difference per problem, resampling problems; None unless all runs have the same ones."""
    if len({run.curve.problem_ids for pair in pairs for run in pair}) > 1:
        return None

    def scores(run: RunCurves) -> Floats | None:
        point = at_budget(run.curve, axis, cost)
        return None if point is None or run.curve.per_problem is None else run.curve.per_problem[point.index]

    rows = [(scores(run), scores(other)) for run, other in pairs]
    differences = [own - reference for own, reference in rows if own is not None and reference is not None]
    return shared_bootstrap(np.mean(differences, axis=0)[None])[0] if len(differences) == len(rows) else None
