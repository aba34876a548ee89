"""Evaluation curve of one run over its costs, and the figures derived from it. Pure.

Definitions, all on a run's evaluations, without interpolation unless it is named:

- peak: the earliest, lowest-BP maximiser (Tables 2 and 5 of arXiv 2605.06755);
- cost to reach a target: the cost of the first evaluation at or above it;
- speed-up: the baseline's cost divided by the candidate's, above 1 where it is faster;
- accuracy at a budget: the last evaluation at or before it, never the best so far;
- plateau: the mean of the evaluations in the last share of a budget;
- token-passes: sampled tokens times the passes over them, a forward pass alone counted as a third of one.

Peaks and first crossings are biased upwards, because they select among noisy values, and the more so the more often a
run is evaluated. So costs are compared on the grid that all runs have in common. Plateau means have no such bias, and
are compared at evaluations that both sides share: while accuracy rises, a mean depends on where it was evaluated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from gxpo_trainer.compare.intervals import Floats, mean_interval

Axis = Literal["steps", "backward_passes", "hours", "tokens", "token_passes"]
AXES: tuple[Axis, ...] = get_args(Axis)
GRID_OF: dict[Axis, Axis] = {axis: "steps" if axis in ("steps", "tokens") else "backward_passes" for axis in AXES}
"""The axis on whose common grid a cost is compared: other costs differ from run to run."""
PLATEAU = 0.4
"""Share of the budget whose evaluations are the plateau, where none was registered."""
NEAR = 0.9
"""Share of the largest common budget from which on a shared evaluation stands for it."""
SAME = 1e-6
"""Costs that differ by no more are equal: passes are sums of thirds or sixths, and the points of a grid are rounded."""


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationCurve:
    """A run's evaluations in order of steps; every array has shape [num_evaluations].

    steps: of the run, without those of a warm start. backward_passes: since the start, without repeated and diagnostic
    ones. hours: training time without evaluation, diagnostics and checkpoints. tokens: sampled tokens. accuracy: in
    [0, 1]. ci_low, ci_high: 95% interval over problems, NaN if unknown. per_problem: [num_evaluations, num_problems] or
    None, weighted so that row means are the accuracy (a macro average may have scores above 1); problem_ids: its
    columns. forward_passes: of a step, without backward passes.
    """

    steps: Floats
    backward_passes: Floats
    hours: Floats
    tokens: Floats
    accuracy: Floats
    ci_low: Floats
    ci_high: Floats
    per_problem: Floats | None = None
    problem_ids: tuple[str, ...] = ()
    forward_passes: float = 0.0

    @property
    def token_passes(self) -> Floats:
        """Tokens times passes, by the mean passes of a step since the evaluation before."""
        steps, passes, tokens = (np.diff(v, prepend=0.0) for v in (self.steps, self.backward_passes, self.tokens))
        per_step = np.divide(passes, steps, out=np.zeros_like(steps), where=steps > 0)
        return np.cumsum(tokens * (per_step + self.forward_passes / 3))

    def cost(self, axis: Axis) -> Floats:
        """The values of one axis, [num_evaluations]."""
        values: Floats = getattr(self, axis)
        return values

    def point(self, index: int) -> Point:
        """The accuracy and costs of one evaluation."""
        return Point(float(self.accuracy[index]), *(float(self.cost(axis)[index]) for axis in AXES))


@dataclass(frozen=True, slots=True, eq=False)
class GateTrace:
    """The gate's z-score at the steps that have one; `threshold` is τ, None without a gate that can fire."""

    steps: Floats = field(default_factory=lambda: np.empty(0))
    z: Floats = field(default_factory=lambda: np.empty(0))
    threshold: float | None = None
    shutoff_step: int | None = None
    two_sided: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RunCurves:
    """One run of a comparison.

    conditions: settings that must be equal for accuracies to be comparable (data, initial policy, sampling …);
    hardware: settings that must be equal for times to be comparable. Values are displayed unchanged. sampling_share:
    share of the run's steps that sampling and verifying took; None if unknown.
    """

    name: str
    rule: str
    seed: int
    curve: EvaluationCurve
    gate: GateTrace = field(default_factory=GateTrace)
    conditions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str] = field(default_factory=dict)
    sampling_share: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation: its accuracy and costs."""

    accuracy: float
    steps: float
    backward_passes: float
    hours: float
    tokens: float
    token_passes: float = math.nan

    def cost(self, axis: Axis) -> float:
        value: float = getattr(self, axis)
        return value


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """The evaluation that counts at a budget. `reached`: the run spent at least the budget."""

    index: int
    accuracy: float
    spent: float
    reached: bool


def peak(curve: EvaluationCurve) -> Point:
    """The earliest, lowest-BP maximiser of the accuracy."""
    best = np.flatnonzero(curve.accuracy == curve.accuracy.max())
    return curve.point(min(best, key=lambda i: (curve.steps[i], curve.backward_passes[i])))


def first_reaching(
    curve: EvaluationCurve, target: float, counted: npt.NDArray[np.bool_] | Literal[True] = True
) -> Point | None:
    """The first evaluation, of those that count, whose accuracy is at least `target`; None when there is none."""
    reached = np.flatnonzero(counted & (curve.accuracy >= target))
    return curve.point(reached[0]) if reached.size else None


def common_grid(curves: Sequence[EvaluationCurve], axis: Axis) -> Floats:
    """Costs at which every run that went so far was evaluated, ascending."""
    costs = [np.round(curve.cost(axis), 6) for curve in curves]
    every = np.unique(np.concatenate(costs))
    shared = [np.isin(every, own) | (every > own[-1]) for own in costs]
    return every[np.all(shared, axis=0)]


def on_grid(curve: EvaluationCurve, axis: Axis, grid: Floats | None) -> npt.NDArray[np.bool_]:
    """Which evaluations lie on a grid of `axis`; all without one."""
    return np.ones(curve.steps.size, bool) if grid is None else np.isin(np.round(curve.cost(axis), 6), grid)


def crossing(curve: EvaluationCurve, target: float, axis: Axis, counted: npt.NDArray[np.bool_]) -> float | None:
    """Cost of the first of the counted evaluations at or above `target`; None if there is none."""
    point = first_reaching(curve, target, counted)
    return None if point is None else point.cost(axis)


def interpolated(curve: EvaluationCurve, target: float, axis: Axis, counted: npt.NDArray[np.bool_]) -> float | None:
    """Cost at which the monotone curve through the counted evaluations reaches `target`, None if it does not.

    That is the isotonic regression of their accuracies, joined by straight lines.
    """
    from scipy.optimize import isotonic_regression

    costs, monotone = curve.cost(axis)[counted], np.asarray(isotonic_regression(curve.accuracy[counted]).x)
    reached = np.flatnonzero(monotone >= target)
    if not reached.size:
        return None
    pair = [max(0, reached[0] - 1), reached[0]]
    return float(np.interp(target, monotone[pair], costs[pair]))


def in_plateau(
    curve: EvaluationCurve, budget: float, window: float = PLATEAU, grid: Floats | None = None
) -> npt.NDArray[np.bool_]:
    """Which evaluations lie in the last share `window` of a budget of backward passes, and on a grid of passes if
    given; never the initial policy's."""
    passes, counted = curve.backward_passes, on_grid(curve, "backward_passes", grid)
    return counted & (passes > 0) & (passes >= (1 - window) * budget - SAME) & (passes <= budget + SAME)


def at_budget(curve: EvaluationCurve, axis: Axis, budget: float) -> BudgetPoint | None:
    """The last evaluation whose cost is at most `budget`; None when the first one came later."""
    costs = curve.cost(axis)
    within = np.flatnonzero(costs <= budget + SAME)
    if not within.size:
        return None
    index = int(within[-1])
    return BudgetPoint(index, float(curve.accuracy[index]), float(costs[index]), bool(costs[-1] >= budget - SAME))


def mean_curve(curves: Sequence[EvaluationCurve]) -> EvaluationCurve:
    """Mean of accuracies and costs over seeds, at the steps that all of them evaluated, or at the backward passes where
    they share more of those: a gate ends the look-ahead of each seed at another step.

    Without scores per problem. Bounds are t-intervals over the seeds, clipped to [0, 1]; a single curve is returned
    unchanged. Raises ValueError where the seeds share no evaluation.
    """
    if len(curves) == 1:
        return curves[0]
    shared = []
    for axis in dict.fromkeys(GRID_OF.values()):
        costs = [np.round(curve.cost(axis), 6) for curve in curves]
        common = functools.reduce(np.intersect1d, costs)
        shared.append([np.searchsorted(own, common) for own in costs])
    rows = max(shared, key=lambda rows: rows[0].size)
    if not rows[0].size:
        raise ValueError(
            "the seeds have no evaluation in common; set the same evaluation.every_steps, or with a gate the same "
            "evaluation.every_backward_passes"
        )
    values = {
        name: np.array([getattr(curve, name)[index] for curve, index in zip(curves, rows, strict=True)])
        for name in ("steps", "backward_passes", "hours", "tokens", "accuracy")
    }
    means = {name: of_seeds.mean(axis=0) for name, of_seeds in values.items()}
    intervals = [mean_interval(of_seeds) for of_seeds in values["accuracy"].T]
    low, high = np.clip(np.array([(i.low, i.high) for i in intervals], dtype=np.float64), 0, 1).T
    return EvaluationCurve(**means, ci_low=low, ci_high=high, forward_passes=curves[0].forward_passes)
