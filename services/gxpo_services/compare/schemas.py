"""Requests and answers about comparisons, and how results become answers. Pure.

Accuracies are shares in [0, 1], hours are training time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.fields import JsonNumber, Text
from gxpo_services.db.tables import Run
from gxpo_services.outputs.metric_series import smooth, thin
from gxpo_services.run_states import RunState
from gxpo_trainer.compare.curves import AXES, Axis, EvaluationCurve, GateTrace, RunCurves
from gxpo_trainer.compare.groups import Comparison
from gxpo_trainer.compare.seeds import SeedGroup

AxisWord = Literal["step", "backward_passes", "hours", "tokens", "token_passes", "time"]
Shown = Literal["final", "best", "steps_to_best", "backward_passes_to_best", "hours_to_best", "shutoff_step"]
MOST_RUNS = 200
"""Runs of one comparison."""
_METRIC = Field("pass@1", pattern=r"^(pass|maj)@[0-9]{1,6}$", description="Share in the evaluations: pass@k or maj@n.")
_BENCHMARK = Field(None, max_length=200, description="A benchmark; default: the macro average of all common ones.")


class RunsQuery(BaseModel):
    """Runs by their ids: repeated parameters, comma-separated words, or both."""

    runs: list[Annotated[Text, Field(max_length=20_000)]] = Field(
        [], max_length=MOST_RUNS, description="Ids of runs.", examples=[["r01jd5cv3q80000000000"]]
    )
    groups: list[Annotated[Text, Field(max_length=20_000)]] = Field(
        [],
        max_length=MOST_RUNS,
        description="Ids of groups; selects all their runs. A comparison takes only the reported runs of a study.",
        examples=[["g01jd5cv3q80000000000"]],
    )


class CompareQuery(RunsQuery):
    """What to compare, and how."""

    baseline: Text | None = Field(
        None,
        max_length=1000,
        description="Name of a configuration, or id or name of one of its runs; default: the "
        "baseline arm of a study, else the most accurate GRPO.",
        examples=["GRPO"],
    )
    metric: str = _METRIC
    benchmark: Text | None = _BENCHMARK
    x: AxisWord = Field("step", description="Unit of plain numbers in `budgets`; time is an alias of hours.")
    budgets: list[Annotated[Text, Field(max_length=1000)]] = Field(
        [],
        max_length=50,
        description="Budgets to compare at: numbers in units of `x` or `axis:number`; default: what all reached.",
        examples=[["backward_passes:108", "backward_passes:300", "hours:4"]],
    )
    smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Weight of the exponential average in `smoothed`, which no figure uses; 0: none.",
    )
    sampling_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of a baseline step that sampling takes, for the table `When it pays`; default: as measured.",
    )
    gates: bool = Field(
        True,
        description="Include gate z-scores; thresholds and shut-off steps are always included. Without z-scores a "
        "response is cached until the next evaluation and is much faster.",
    )


class HeatMapQuery(BaseModel):
    """Two settings of a sweep, and what the cells show."""

    x: Text | None = Field(None, max_length=200, description="Dotted path; default: the first setting that varies.")
    y: Text | None = Field(None, max_length=200, description="Dotted path; default: the next one.")
    metric: str = _METRIC
    benchmark: Text | None = _BENCHMARK
    show: Shown = Field("final", description="Last or best accuracy, cost of the best, or the gate's shut-off step.")


class ExportQuery(RunsQuery):
    """What to write, and how."""

    format: Literal["csv", "jsonl"] = Field("csv", description="Of the files.")
    parts: list[Literal["metrics", "evaluations", "runs", "samples"]] = Field(
        ["metrics", "evaluations", "runs"],
        min_length=1,
        max_length=4,
        description="Tables to write: one is a file, several are a zip archive.",
    )


class _View(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class PointView(_View):
    """An evaluation: accuracy and cumulative cost; NaN where unknown."""

    accuracy: JsonNumber = Field(examples=[0.341])
    steps: JsonNumber = Field(examples=[240])
    backward_passes: JsonNumber = Field(examples=[240])
    hours: JsonNumber = Field(examples=[14.14])
    tokens: JsonNumber = Field(examples=[1.2e8])
    token_passes: JsonNumber = Field(examples=[1.2e8])


class IntervalView(_View):
    """An estimate with its confidence bounds; null where `num` observations cannot give any."""

    mean: JsonNumber
    low: JsonNumber | None
    high: JsonNumber | None
    num: int


class CurveView(_View):
    """Evaluations in order of steps; all lists have equal lengths."""

    steps: list[JsonNumber]
    backward_passes: list[JsonNumber]
    hours: list[JsonNumber]
    tokens: list[JsonNumber]
    token_passes: list[JsonNumber] = Field(description="Tokens times passes over them; a forward pass is a third.")
    accuracy: list[JsonNumber]
    smoothed: list[JsonNumber] = Field(description="Exponential moving average.")
    low: list[JsonNumber] = Field(description="Lower bound: over seeds, over problems where there is one seed.")
    high: list[JsonNumber]


class GateView(_View):
    """The gate's z-score, never smoothed."""

    steps: list[JsonNumber]
    z: list[JsonNumber]
    threshold: JsonNumber | None = Field(description="τ; null without a gate that can fire.")
    shutoff_step: int | None = Field(description="Step at which the look-ahead was switched off.")
    two_sided: bool
    downsampled: bool = Field(description="Whether the series was thinned; minima and maxima are kept.")


class ComparedRun(_View):
    """One seed of a configuration, against the baseline's run of the same seed."""

    id: str
    name: str
    state: RunState
    seed: int
    group: str | None = Field(description="Id of its group.")
    group_values: dict[str, Any] | None
    curve: CurveView
    gate: GateView
    peak: PointView
    target: PointView | None = Field(description="Peak of the baseline's run of this seed; null: it has none.")
    match: PointView | None = Field(description="First evaluation at or above the target; null: not reached.")
    speed_ups: dict[Axis, JsonNumber | None] = Field(description="Cost of the target / cost of the match.")


class BudgetView(_View):
    """A configuration at one budget: the last evaluation at or before it counts, never the best so far."""

    axis: Axis
    budget: JsonNumber
    accuracy: IntervalView = Field(description="Mean over seeds.")
    over_seeds: IntervalView | None = Field(description="Difference to the baseline, paired by seed.")
    over_problems: IntervalView | None = Field(description="The same over problems, conditional on these seeds.")
    all_reached: bool = Field(description="False when a run ended before the budget.")
    evaluated_from: JsonNumber = Field(description="Smallest cost of an evaluation that counts; 0: initial policy.")


class PlateauView(_View):
    """Mean accuracy over the last 40% of the common budget of backward passes, at the evaluations that the
    configuration and the baseline share."""

    own: IntervalView
    difference: IntervalView = Field(description="Paired by seed.")
    adjusted: JsonNumber | None = Field(description="p-value of the paired t-test after Holm's correction.")
    welch: JsonNumber | None = Field(description="p-value of Welch's t-test, uncorrected.")
    verdict: str = Field(examples=["equivalent within 1 point"])


class ComparedGroup(_View):
    """A configuration: runs that differ only in name and seed."""

    name: str = Field(description="Its rule, and the settings that distinguish it.", examples=["GXPO K=5"])
    rule: str
    is_baseline: bool
    seeds: list[int]
    runs: list[ComparedRun]
    mean: CurveView = Field(description="Mean over seeds, at the steps that all of them evaluated.")
    final: PointView
    peak: PointView
    match: PointView | None = Field(description="Where the mean reaches the baseline's peak; null: not reached.")
    speed_ups: dict[Axis, JsonNumber | None]
    num_paired: int = Field(description="Seeds shared with the baseline.")
    num_reached: int = Field(description="Number of these that reached the peak of the baseline's run.")
    seed_speed_ups: dict[Axis, IntervalView | None] = Field(
        description="Geometric mean over the `num` seeds that reached it; too good where that is below `num_paired`."
    )
    budgets: list[BudgetView]
    plateau: PlateauView | None = Field(description="Null for the baseline, and without a shared evaluation in it.")
    at_equal_passes: BudgetView | None = Field(description="At the largest common budget; null: not evaluated.")
    shutoff_steps: list[int | None]


class DifferenceView(_View):
    """A differing condition or piece of hardware: values by configuration."""

    setting: str
    values: dict[str, list[str]]
    hardware: bool = Field(description="Affects only the comparison of hours.")


class SettingView(_View):
    """A setting that differs between configurations; values are JSON text, null: absent."""

    setting: str = Field(examples=["learner.rule.k"])
    values: dict[str, str | None]


class LeftOutView(_View):
    """A run that is excluded."""

    run: str = Field(description="Its id.")
    name: str
    reason: str

    @classmethod
    def of(cls, run: Run, reason: str) -> LeftOutView:
        return cls(run=run.id, name=run.name, reason=reason)


class TableView(_View):
    """A table of text cells."""

    title: str
    header: list[str]
    rows: list[list[str]]


class ComparisonView(_View):
    """Comparison of configurations at equal cost, with confidence intervals."""

    metric: str
    benchmarks: list[str] = Field(description="Benchmarks that accuracies are averaged over.")
    x: Axis
    baseline: str = Field(description="Name of a configuration.")
    smoothing: float
    level: float = Field(description="Of all intervals.", examples=[0.95])
    target: PointView = Field(description="The baseline's peak.")
    groups: list[ComparedGroup]
    differences: list[DifferenceView] = Field(description="Conditions that make the comparison unfair.")
    settings: list[SettingView] = Field(description="All differing settings, including the compared ones.")
    ranking: list[str] = Field(
        description="Names of the configurations, by `at_equal_passes`, the most accurate first."
    )
    evidence: str = Field(description="The headline, then what the evidence supports and does not; a statement a line.")
    conclusive: bool = Field(description="Whether the headline's difference is shown over seeds, in equal conditions.")
    supported: dict[str, list[Axis]] = Field(description="Configuration → costs at which its advantage is supported.")
    missing: list[str] = Field(description="What a conclusion would require.")
    left_out: list[LeftOutView]
    tables: list[TableView] = Field(description="The ranking first.")


class HeatCellView(_View):
    """One pair of values. mean: over its runs, null when none has a value yet."""

    x: int = Field(description="Index into x_values.")
    y: int = Field(description="Index into y_values.")
    value: IntervalView | None
    runs: list[str] = Field(description="Ids.")


class HeatMapView(_View):
    """A sweep over two settings."""

    group: str
    x: str = Field(examples=["learner.rule.alpha"])
    y: str = Field(examples=["learner.rule.k"])
    show: Shown
    metric: str
    benchmarks: list[str]
    x_values: list[Any]
    y_values: list[Any]
    cells: list[HeatCellView]
    settings: list[str] = Field(description="Settings that vary: what x and y may be.")
    mixed: list[str] = Field(description="Settings that vary within a cell and are averaged over.")
    left_out: list[LeftOutView] = Field(description="Runs that are not part of the grid, such as controls.")


_GATE_POINTS = 200
"""Points of a gate in a response."""


def compared_group(
    group: SeedGroup, comparison: Comparison, rows: Mapping[RunCurves, Run], smoothing: float
) -> ComparedGroup:
    """rows: every run of the comparison."""
    result = comparison.group(group.name)
    own = {name: getattr(result, name) for name in ComparedGroup.model_fields if hasattr(result, name)}
    runs = [
        {
            **{name: getattr(rows[curves], name) for name in ("id", "name", "state", "group_values")},
            **{name: getattr(seed, name) for name in ("peak", "target", "match", "speed_ups")},
            "seed": curves.seed,
            "group": getattr(rows[curves].group, "id", None),
            "curve": curve_view(curves.curve, smoothing),
            "gate": gate_view(curves.gate, _GATE_POINTS),
        }
        for curves, seed in zip(group.runs, result.by_seed, strict=True)
    ]
    mean = curve_view(group.mean, smoothing)
    own |= {"rule": group.runs[0].rule, "is_baseline": group.name == comparison.baseline, "mean": mean, "runs": runs}
    return ComparedGroup.model_validate(own)


def curve_view(curve: EvaluationCurve, smoothing: float) -> CurveView:
    costs = {axis: curve.cost(axis).tolist() for axis in AXES}
    return CurveView(
        **costs,
        accuracy=curve.accuracy.tolist(),
        smoothed=smooth(curve.accuracy, smoothing).tolist(),
        low=curve.ci_low.tolist(),
        high=curve.ci_high.tolist(),
    )


def gate_view(gate: GateTrace, most: int) -> GateView:
    """A gate trace thinned to at most `most` points."""
    kept = thin(gate.z, most)
    points = {"steps": gate.steps[kept].tolist(), "z": gate.z[kept].tolist(), "downsampled": len(kept) < len(gate.z)}
    return GateView(**asdict(gate) | points)
