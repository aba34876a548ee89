"""A study's file (arms, seeds, one budget, learning rates to tune over) and the runs that can start now. Pure.

Arms are executed one after the other: first an arm's ladder, upwards until its accuracy falls, then all its reported
seeds at the best rate, then what is evaluated of them. So an interrupted study has complete arms instead of many
half-finished ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from gxpo_trainer.compare.curves import PLATEAU
from gxpo_trainer.compare.groups import TARGETS
from gxpo_trainer.compare.intervals import MARGIN
from gxpo_trainer.config import RunConfig, Settings
from gxpo_trainer.config.base import LARGEST_INTEGER, MOST_STEPS
from gxpo_trainer.config.io import load_preset, read_settings
from gxpo_trainer.config.messages import config_error
from gxpo_trainer.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class Arm(Settings):
    """One configuration under test, trained at its own best learning rate."""

    label: str = Field(min_length=1, max_length=200, description="Name in tables and charts.")
    overrides: tuple[str, ...] = Field(
        (), max_length=200, description="Settings `a.b=c` in addition to those of the study."
    )
    learning_rate_of: str | None = Field(None, description="Take the best rate of this arm instead of a ladder.")
    learning_rate_factor: float = Field(1.0, gt=0, description="With learning_rate_of: multiply that rate.")


class Ladder(Settings):
    """Learning rates that every arm is tuned over, upwards until its accuracy falls."""

    learning_rates: tuple[float, ...] = Field(min_length=1, max_length=100, description="In ascending order.")
    seeds: tuple[int, ...] = Field(min_length=1, max_length=100, description="Apart from the reported seeds.")
    backward_passes: int = Field(ge=1, le=LARGEST_INTEGER, description="Budget of a run of the ladder.")
    drop: float = Field(
        0.1, gt=0, lt=1, description="A rate whose accuracy lies this far below the arm's best ends its ladder."
    )

    @field_validator("learning_rates")
    @classmethod
    def _ascending(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if any(not low < high for low, high in itertools.pairwise((0.0, *rates))):
            raise ValueError("must be positive and in ascending order")
        return rates


class Analysis(Settings):
    """What is computed of the results. The first `gxpo study run` registers it, before there are any."""

    plateau: float = Field(
        PLATEAU, gt=0, le=1, description="The plateau is the mean of the evaluations in this last share of the budget."
    )
    margin: float = Field(
        MARGIN, gt=0, lt=1, description="Largest difference of plateaus that counts as none: 0.01 is one point."
    )
    targets: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        TARGETS, min_length=1, max_length=20, description="Shares of the best plateau that costs are compared to."
    )
    comparisons: tuple[str, ...] = Field(
        (), max_length=100, description="Arms that are tested against the baseline, as one family; default: all."
    )


class Study(Settings):
    """Everything that a study fixes before its first run."""

    name: str = Field(description="Letters, digits and dashes; names the folder of its runs and data.")
    title: str = Field(min_length=1, description="Heading of the report.")
    question: str = Field("", max_length=2000, description="For the report: what the study asks.")
    task: str = Field("", max_length=5000, description="For the report: what is trained, and what that can show.")
    limits: tuple[str, ...] = Field(
        (), max_length=100, description="For the report and its summary: what does not follow from the results."
    )
    remarks: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="For the report: what was added or changed after the first run, and other circumstances.",
    )
    preset: str = Field("demo", description="Settings that all arms start from.")
    overrides: tuple[str, ...] = Field((), max_length=200, description="Settings `a.b=c` of all arms.")
    baseline: str = Field(description="Arm that the others are compared with.")
    seeds: tuple[int, ...] = Field(min_length=2, max_length=100, description="Reported seeds, shared by all arms.")
    backward_passes: int = Field(ge=1, le=LARGEST_INTEGER, description="Budget of a reported run.")
    evaluate_every: int = Field(
        ge=1, le=MOST_STEPS, description="Backward passes between evaluations, rounded to whole steps."
    )
    compare_at: tuple[Annotated[int, Field(le=LARGEST_INTEGER)], ...] = Field(
        (), max_length=1000, description="Backward passes at which arms are compared, besides the end of the budget."
    )
    analysis: Analysis = Field(Analysis(), description="What is computed of the results.")
    ladder: Ladder
    arms: dict[str, Arm] = Field(min_length=2, max_length=100, description="In order of execution.")

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, data: Any) -> Any:
        """Studies that 0.1.0 stored have `extrapolation`, as null, and one `target`: both are gone."""
        gone = {"target"} | (
            {"extrapolation"} if isinstance(data, dict) and data.get("extrapolation") is None else set()
        )
        return {name: value for name, value in data.items() if name not in gone} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        for name in (self.name, *self.arms):
            if not _NAME.fullmatch(name):
                raise ValueError(f"name {name!r} must consist of lower-case letters, digits and dashes, at most 40")
        if self.baseline not in self.arms:
            raise ValueError(f"baseline = {self.baseline!r} is no arm; choose one of {', '.join(self.arms)}")
        if unknown := set(self.analysis.comparisons) - (set(self.arms) - {self.baseline}):
            raise ValueError(f"analysis.comparisons names {sorted(unknown)}; name arms other than the baseline")
        if shared := set(self.seeds) & set(self.ladder.seeds):
            raise ValueError(
                f"seeds {sorted(shared)} are used for tuning and reported; choose others in ladder.seeds, for an arm "
                "tuned on the seeds that it is judged by looks better than it is"
            )
        for cost in self.compare_at:
            if cost >= self.backward_passes or cost < 1 or cost % self.evaluate_every:
                raise ValueError(
                    f"compare_at = {list(self.compare_at)}: {cost} is not evaluated within the budget; choose "
                    f"multiples of evaluate_every = {self.evaluate_every} below backward_passes = "
                    f"{self.backward_passes}"
                )
        for seeds in (self.seeds, self.ladder.seeds):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"seeds {list(seeds)} contain one twice; name each once")
        for name, arm in self.arms.items():
            source = arm.learning_rate_of
            if source is not None and (source not in self.arms or self.arms[source].learning_rate_of is not None):
                raise ValueError(f"arms.{name}.learning_rate_of = {source!r} must name an arm with a ladder of its own")
        return self


def load_study(path: Path) -> Study:
    """The study of a .toml or .json file. Raises ConfigError with every bad setting."""
    settings = read_settings(path, fix="docs/studies.md has an example of a study file")
    if "arms" not in settings and {"model", "rollout", "learner", "budget"} & set(settings):
        raise ConfigError(f"{path} is a run, not a study; `gxpo train {path}` executes it, docs/studies.md has a study")
    try:
        return Study.model_validate(settings)
    except ValidationError as error:
        raise config_error(error, str(path), Study) from None


Stage = Literal["ladder", "report"]


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identifies a run of a study."""

    stage: Stage
    arm: str
    learning_rate: float
    seed: int

    @property
    def folder(self) -> str:
        """Path below the study's folder."""
        return f"{self.stage}/{self.arm}/lr-{self.learning_rate:g}-seed-{self.seed}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. accuracy: of its last evaluation, in [0, 1]. diverged: its loss or gradient was not finite."""

    accuracy: float
    diverged: bool = False


Results = Mapping[RunKey, RunResult]


def pending(study: Study, results: Results) -> list[RunKey]:
    """The missing runs whose learning rate is known, in order of execution; empty when the study is complete."""
    return [key for arm in study.arms for key in _of_arm(study, arm, results) if key not in results]


def best_rate(study: Study, arm: str, results: Results) -> float | None:
    """The rate with the highest mean accuracy over the ladder's seeds, the lowest of several; None while unknown."""
    source = study.arms[arm].learning_rate_of
    if source is not None:
        rate = best_rate(study, source, results)
        return None if rate is None else rate * study.arms[arm].learning_rate_factor
    means: dict[float, float] = {}
    for rate in study.ladder.learning_rates:
        rung = _rung(study, arm, rate)
        if any(key not in results for key in rung):
            return None
        ends = [results[key] for key in rung]
        means[rate] = 0.0 if any(end.diverged for end in ends) else fmean(end.accuracy for end in ends)
        if means[rate] < max(means.values()) - study.ladder.drop:
            break
    return max(means, key=lambda rate: means[rate])


def run_config(study: Study, key: RunKey) -> RunConfig:
    """The config of a run. Raises ConfigError for overrides that do not fit."""
    passes = study.backward_passes if key.stage == "report" else study.ladder.backward_passes
    overrides = [
        *study.overrides,
        *study.arms[key.arm].overrides,
        f"learner.optimizer.learning_rate={key.learning_rate!r}",
        f"seed={key.seed}",
        "budget.steps=none",
        f"budget.backward_passes={passes}",
    ]
    per_step = load_preset(study.preset, overrides).learner.rule.passes_per_step(gate_open=True)
    # A rung of the ladder counts by its end alone.
    between = study.evaluate_every if key.stage == "report" else passes
    every = max(1, round(between / per_step))
    name = f"{study.name} {key.arm} {key.learning_rate:g} seed {key.seed}"
    return load_preset(study.preset, [*overrides, f"evaluation.every_steps={every}", f'name="{name}"'])


def registration(study: Study, registered: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """What of a study is as registered, its dump before the first run if known, and what is exploratory."""

    def choices(dumped: Mapping[str, Any]) -> dict[str, Any]:
        analysis, of_ladder = dumped["analysis"], dumped["ladder"]
        return {
            "arms": (dumped["arms"], dumped["baseline"]),
            "seeds": (dumped["seeds"], of_ladder["seeds"]),
            "budgets": (dumped["backward_passes"], dumped["evaluate_every"], of_ladder),
            "costs of comparison": dumped["compare_at"],
            "plateau window": analysis["plateau"],
            "equivalence margin": analysis["margin"],
            "targets": analysis["targets"],
            "comparisons": analysis["comparisons"],
        }

    now, then = choices(study.model_dump(mode="json")), choices(registered) if registered else {}
    kept = [name for name, value in now.items() if name in then and then[name] == value]
    return kept, [name for name in now if name not in kept]


def largest_cost(study: Study) -> tuple[int, int]:
    """(runs, backward passes) if every ladder is climbed to its end; an upper bound."""
    tuned = sum(arm.learning_rate_of is None for arm in study.arms.values())
    rungs = tuned * len(study.ladder.learning_rates) * len(study.ladder.seeds)
    reported = len(study.arms) * len(study.seeds)
    return rungs + reported, rungs * study.ladder.backward_passes + reported * study.backward_passes


def _of_arm(study: Study, arm: str, results: Results) -> Iterator[RunKey]:
    """The runs of an arm as far as they are known: the ladder to its next open rate, then the reported seeds."""
    rate = best_rate(study, arm, results)
    if rate is not None:
        yield from (RunKey("report", arm, rate, seed) for seed in study.seeds)
    elif study.arms[arm].learning_rate_of is None:
        for step in study.ladder.learning_rates:
            rung = _rung(study, arm, step)
            yield from rung
            if any(key not in results for key in rung):
                return


def _rung(study: Study, arm: str, rate: float) -> list[RunKey]:
    return [RunKey("ladder", arm, rate, seed) for seed in study.ladder.seeds]
