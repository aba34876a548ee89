"""The findings of a study: every figure of its report, with intervals over seeds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal, TypeVar

import numpy as np

from gxpo_trainer.compare.curves import SAME, Axis, common_grid
from gxpo_trainer.compare.groups import (
    Grids,
    Reach,
    best_plateau,
    common_budgets,
    common_grids,
    plateau_contrasts,
    plateaus,
    sweep,
)
from gxpo_trainer.compare.intervals import Contrast, Interval, contrast, corrected, detectable, holm, mean_interval
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.jsonl import Row
from gxpo_trainer.studies.data import MEDIANS, StudyData, key_of
from gxpo_trainer.studies.definition import Point

COLLAPSED = 0.5
"""A run whose last accuracy is below this share of its peak has collapsed."""
SWEPT: tuple[Axis, ...] = ("steps", "backward_passes", "token_passes")
"""Costs of a study: batches, gradients, and gradients weighted by their tokens."""
Cost = tuple[Axis, float]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class ArmFindings:
    """One arm. final, plateau: accuracies; plateau: NaN where a run ended before it. tuning: (point, mean accuracy over
    its seeds, seeds, diverged), by rate.

    tested: whether its comparison with the baseline is. tuning_runs: 0 for an arm with another's rate. edge: the best
    rate is the lowest or highest of several that were tried. against: plateau against the baseline; None for the
    baseline, and without a plateau. equal: accuracy against the baseline's at equal costs. sweep: costs to the targets,
    by axis. fewer: p-value by axis that its cost differs from the baseline's at every target, in one direction; None
    where a target is not reached, and for an arm that is not tested. medians: of the diagnostics, over seeds.
    """

    arm: str
    label: str
    tested: bool
    point: Point
    seeds: tuple[int, ...]
    final: Interval
    plateau: Interval
    tuning: tuple[tuple[Point, float, int, bool], ...]
    tuning_runs: int
    edge: Literal["lowest", "highest"] | None
    collapsed: int
    diverged: int
    medians: dict[str, float]
    against: Contrast | None
    equal: Mapping[Cost, Contrast]
    sweep: Mapping[Axis, list[Reach]]
    fewer: Mapping[Axis, float | None]


@dataclass(frozen=True, slots=True)
class Findings:
    """arms: those with all reported seeds, the baseline first. missing: labels of the others.

    targets: accuracy by share of the best plateau, without those that a run meets at its start. grids: the common grids
    of batches and passes. detectable: smallest difference of plateaus that the study shows with 80% probability; None
    without a spread.
    """

    baseline: ArmFindings
    arms: tuple[ArmFindings, ...]
    missing: tuple[str, ...]
    targets: dict[float, float]
    best: float
    grids: Grids
    detectable: float | None

    @property
    def candidates(self) -> list[ArmFindings]:
        return [arm for arm in self.arms if arm.arm != self.baseline.arm]


def find(data: StudyData) -> Findings | None:
    """The findings; None before the baseline has all its seeds, and where one of them has no evaluation."""
    study, plan = data.study, data.study.analysis
    complete = [arm for arm in study.arms if len(data.reported(arm)) == len(study.seeds)]
    # A run that diverged before its first evaluation has no curve: its arm is tested, and nothing is shown for it.
    groups = {arm: group for arm in complete if (group := data.group(arm)) and len(group.runs) == len(study.seeds)}
    if study.baseline not in groups:
        return None
    reference, tested = groups[study.baseline], study.tested & set(complete)
    grids = common_grids(list(groups.values()))
    best = best_plateau(list(groups.values()), study.backward_passes, plan.plateau)
    curves = [run.curve for group in groups.values() for run in group.runs]
    start = max((float(curve.accuracy[0]) for curve in curves if curve.steps[0] == 0), default=0.0)
    targets = {share: share * best for share in plan.targets if share * best > start}
    raw = plateau_contrasts(list(groups.values()), reference, study.backward_passes, plan.plateau, plan.margin)
    of_plateaus = {arm: raw[group.name] for arm, group in groups.items() if group.name in raw}
    against = _family(of_plateaus, tested, len(tested))
    equal = _equal_costs(groups, reference, study.compare_at, study.backward_passes, plan.margin)
    for axis in SWEPT:
        of_axis = {key: one for key, one in equal.items() if key[1][0] == axis}
        most = max(Counter(arm for arm, _ in of_axis).values(), default=0)
        equal |= _family(of_axis, {key for key in of_axis if key[0] in tested}, most * len(tested))
    reached = [*targets.values()]
    swept = {arm: {axis: sweep(g, reference, reached, grids, axis) for axis in SWEPT} for arm, g in groups.items()}
    keys = [(arm, axis) for arm in tested for axis in SWEPT]
    p_values = [_p_of_sweep(swept[arm][axis]) if arm in swept else None for arm, axis in keys]
    fewer = dict(zip(keys, holm(p_values), strict=True))
    arms = [
        _arm(
            data,
            groups.get(arm),
            arm=arm,
            against=against.get(arm),
            equal={cost: one for (name, cost), one in equal.items() if name == arm},
            sweep=swept.get(arm, {axis: [] for axis in SWEPT}),
            fewer={axis: fewer.get((arm, axis)) for axis in SWEPT},
        )
        for arm in [study.baseline, *(arm for arm in complete if arm != study.baseline)]
    ]
    missing = tuple(study.arms[arm].label for arm in study.arms if arm not in complete)
    family = [one for arm, one in against.items() if arm in tested]
    return Findings(arms[0], tuple(arms), missing, targets, best, grids, detectable(family, len(tested)))


def _family(contrasts: Mapping[K, Contrast], tested: Iterable[K], planned: int) -> dict[K, Contrast]:
    """Holm's correction over the tested contrasts; the others keep their interval and no test."""
    keys = [key for key in contrasts if key in set(tested)]
    done = dict(zip(keys, corrected([contrasts[key] for key in keys], planned), strict=True))
    return {key: done.get(key, replace(one, adjusted=None, equivalence=None)) for key, one in contrasts.items()}


def _p_of_sweep(reaches: list[Reach]) -> float | None:
    """That the cost differs in one direction at every target: the largest p-value (an intersection-union test)."""
    ratios = [reach.interpolated.mean if reach.interpolated else 1.0 for reach in reaches]
    values = [reach.p_value for reach in reaches if reach.p_value is not None]
    one_way = all(ratio > 1 for ratio in ratios) or all(ratio < 1 for ratio in ratios)
    return max(values) if values and one_way and len(values) == len(reaches) else None


def _equal_costs(
    groups: Mapping[str, SeedGroup], reference: SeedGroup, compare_at: Iterable[float], budget: float, margin: float
) -> dict[tuple[str, Cost], Contrast]:
    """Accuracy by arm and cost: at the requested passes, at the most common batches and at the common token-passes."""
    least = common_budgets(list(groups.values())).get("token_passes", ())
    contrasts = {}
    for arm, group in groups.items():
        if group.name == reference.name:
            continue
        curves = [run.curve for run in (*group.runs, *reference.runs)]
        steps = common_grid(curves, "steps")
        most = max((s for s in steps if all(s <= c.steps[-1] for c in curves)), default=0.0)
        costs: list[Cost] = [
            ("backward_passes", cost)
            for cost in (*compare_at, budget)
            if all(np.isclose(curve.backward_passes, cost, rtol=0, atol=SAME).any() for curve in curves)
        ]
        costs += [("steps", float(most))] if most else []
        costs += [("token_passes", cost) for cost in least if all(0 < cost <= c.token_passes[-1] for c in curves)]
        for axis, cost in costs:
            # On the line between two evaluations, which at a common evaluation is that one.
            own, other = (
                {run.seed: float(np.interp(cost, run.curve.cost(axis), run.curve.accuracy)) for run in g.runs}
                for g in (group, reference)
            )
            if compared := contrast(own, other, margin):
                contrasts[arm, (axis, cost)] = compared
    return contrasts


def _arm(data: StudyData, group: SeedGroup | None, arm: str, **compared: Any) -> ArmFindings:
    study, rows = data.study, data.reported(arm)
    tuning: dict[Point, list[Row]] = {}
    for row in data.runs:
        if row["stage"] == "ladder" and row["arm"] == arm:
            tuning.setdefault(key_of(row).point, []).append(row)
    point, rates = key_of(rows[0]).point, {tried.learning_rate for tried in tuning}
    ends: dict[float, Literal["lowest", "highest"]] = {min(rates): "lowest", max(rates): "highest"} if rates else {}
    medians = {name: [row[name] for row in rows if row[name] is not None] for name in MEDIANS}
    own = (group and plateaus(group, study.backward_passes, study.analysis.plateau)) or {}
    return ArmFindings(
        arm=arm,
        label=study.arms[arm].label,
        tested=arm in study.tested,
        point=point,
        seeds=tuple(int(row["seed"]) for row in rows),
        final=mean_interval([float(row["accuracy"]) for row in rows]),
        plateau=mean_interval(list(own.values())) if own else Interval(np.nan, None, None, 0),
        tuning=tuple(
            (tried, fmean(row["accuracy"] for row in runs), len(runs), any(row["diverged"] for row in runs))
            for tried, runs in sorted(tuning.items(), key=lambda item: (item[0].learning_rate, item[0].settings))
        ),
        tuning_runs=sum(map(len, tuning.values())),
        edge=ends.get(point.learning_rate) if len(rates) > 1 else None,
        collapsed=sum(row["accuracy"] < COLLAPSED * row["peak"] for row in rows),
        diverged=sum(row["diverged"] for row in rows),
        medians={name: median(values) for name, values in medians.items() if values},
        **compared,
    )
