"""A study's file (arms, seeds, one budget, what is tuned) and the runs that can start now. Pure.

Arms are executed one after the other: first an arm is tuned, then all its reported seeds run at what came out best. So
an interrupted study has complete arms instead of many half-finished ones. Tuning is a ladder of learning rates, climbed
until the accuracy falls, or a random search over several settings with successive halving (Jamieson & Talwalkar 2016,
arXiv 1502.07943): each round gives the better half of the points one more seed.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError, field_validator, model_validator

from gxpo_trainer.compare.curves import PLATEAU, SAME
from gxpo_trainer.compare.intervals import MARGIN
from gxpo_trainer.config import RunConfig, Settings
from gxpo_trainer.config.base import LARGEST_INTEGER, MOST_STEPS
from gxpo_trainer.config.io import check_implementations, load_preset, read_settings
from gxpo_trainer.config.messages import config_error
from gxpo_trainer.data.checks import FIRST_ROWS, check_files
from gxpo_trainer.errors import ConfigError, DataError

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


_RATE = "learner.optimizer.learning_rate"
_OF_EACH_RUN = (
    *(_RATE, "name", "seed", "budget.steps", "budget.backward_passes", "evaluation.every_steps"),
    "evaluation.every_backward_passes",
)
"""Settings that `run_config` sets."""
MOST_POINTS = 2**53
"""Of a search space, whose points are numbered by 64-bit integers."""
SettingValues = dict[
    Annotated[str, Field(pattern=r"^[a-z_0-9]+(\.[a-z_0-9]+)+$")],
    Annotated[tuple[bool | int | float | str, ...], Field(min_length=1, max_length=100)],
]
"""Values to try by dotted setting."""


class Arm(Settings):
    """One configuration under test, trained at what tuning found best for it."""

    label: str = Field(min_length=1, max_length=200, description="Name in tables and charts.")
    overrides: tuple[str, ...] = Field((), max_length=200, description="Settings `a.b=c` beside those of the study.")
    search: SettingValues = Field(
        {}, max_length=20, description="Values of settings that this arm alone has, in addition to search.settings."
    )
    learning_rate_of: str | None = Field(None, description="Take what tuning found for this arm instead of tuning.")
    learning_rate_factor: FiniteFloat = Field(1.0, gt=0, description="With learning_rate_of: multiply that rate.")


class Ladder(Settings):
    """Learning rates that every arm is tuned over, upwards until its accuracy falls."""

    learning_rates: tuple[FiniteFloat, ...] = Field(min_length=1, max_length=100, description="In ascending order.")
    seeds: tuple[int, ...] = Field(min_length=1, max_length=100, description="Apart from the reported seeds.")
    backward_passes: int = Field(ge=1, le=LARGEST_INTEGER, description="Budget of a run of the ladder.")
    drop: float = Field(0.1, gt=0, lt=1, description="A rate this far below the arm's best accuracy ends its ladder.")

    @field_validator("learning_rates")
    @classmethod
    def _ascending(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if any(not low < high for low, high in itertools.pairwise((0.0, *rates))):
            raise ValueError("must be positive and in ascending order")
        if len({str(Point(rate)) for rate in rates}) < len(rates):
            raise ValueError("has two rates that are equal to six digits; their runs would share a folder")
        return rates


class Search(Settings):
    """A random search over settings, with as many runs for every arm."""

    settings: SettingValues = Field(min_length=1, max_length=20, description=f"Values by setting; {_RATE} among them.")
    runs: int = Field(ge=1, le=10_000, description="Most tuning runs of an arm, over all rounds.")
    seeds: tuple[int, ...] = Field(
        min_length=1,
        max_length=20,
        description="Apart from the reported seeds. Each is a round: all points run on the first, the better half "
        "of them on the next.",
    )
    backward_passes: int = Field(
        ge=1, le=LARGEST_INTEGER, description="Budget of a tuning run: a short one tunes for speed, a long one for "
        "the plateau."
    )  # fmt: skip

    @model_validator(mode="after")
    def _with_rates(self) -> Search:
        if _RATE not in self.settings:
            raise ValueError(f"settings has no {_RATE}; every arm is tuned over it")
        if self.runs < len(self.rounds):
            raise ValueError(f"runs = {self.runs} does not cover one run on each of {len(self.seeds)} seeds")
        return self

    @property
    def rounds(self) -> list[int]:
        """Points in each round: halved from one to the next, at most `runs` in all."""
        first = max(1, math.floor(self.runs / sum(0.5**number for number in range(len(self.seeds)))))
        while sum(rounds := [max(1, first >> number) for number in range(len(self.seeds))]) > self.runs and first > 1:
            first -= 1
        return rounds


class Analysis(Settings):
    """What is computed of the results. The first `gxpo study run` registers it, before there are any."""

    plateau: float = Field(PLATEAU, gt=0, le=1, description="Plateau: the mean over this last share of the budget.")
    margin: float = Field(MARGIN, gt=0, lt=1, description="Difference of plateaus that counts as none; 0.01: a point.")
    targets: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
        min_length=1,
        max_length=20,
        description="Shares of the best plateau that costs are compared to.",
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
    limits: tuple[str, ...] = Field((), max_length=100, description="For the report and summary: what does not follow.")
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
    evaluate_every: int = Field(ge=1, le=MOST_STEPS, description="Passes between evaluations, in whole steps.")
    compare_at: tuple[Annotated[int, Field(le=LARGEST_INTEGER)], ...] = Field(
        (), max_length=1000, description="Backward passes at which arms are compared, besides the end of the budget."
    )
    analysis: Analysis = Field(Analysis(), description="What is computed of the results.")
    ladder: Ladder | None = Field(None, description="Tune over learning rates alone; this or search.")
    search: Search | None = Field(None, description="Tune over several settings.")
    arms: dict[str, Arm] = Field(min_length=2, max_length=100, description="In order of execution.")

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        for name in (self.name, *self.arms):
            if not _NAME.fullmatch(name):
                raise ValueError(f"name {name!r} must consist of lower-case letters, digits and dashes, at most 40")
        if self.baseline not in self.arms:
            raise ValueError(f"baseline = {self.baseline!r} is no arm; choose one of {', '.join(self.arms)}")
        if unknown := set(self.analysis.comparisons) - (set(self.arms) - {self.baseline}):
            raise ValueError(f"analysis.comparisons names {sorted(unknown)}; name arms other than the baseline")
        if (self.ladder is None) == (self.search is None):
            raise ValueError("give [ladder] to tune over learning rates, or [search] for several settings; one of them")
        if shared := set(self.seeds) & set(self.tuning.seeds):
            table = "ladder" if self.search is None else "search"
            raise ValueError(
                f"seeds {sorted(shared)} are used for tuning and reported; choose others in {table}.seeds, for an arm "
                "tuned on the seeds that it is judged by looks better than it is"
            )
        within = range(self.evaluate_every, self.backward_passes, self.evaluate_every)
        if bad := [cost for cost in self.compare_at if cost not in within]:
            raise ValueError(
                f"compare_at = {list(self.compare_at)}: {bad[0]} is not evaluated within the budget; choose multiples "
                f"of evaluate_every = {self.evaluate_every} below backward_passes = {self.backward_passes}"
            )
        for seeds in (self.seeds, self.tuning.seeds):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"seeds {list(seeds)} contain one twice; name each once")
        for label, count in Counter(arm.label for arm in self.arms.values()).items():
            if count > 1:
                raise ValueError(f"label {label!r} is that of {count} arms, so tables would mix them; name each once")
        for name, arm in self.arms.items():
            source = arm.learning_rate_of
            if source is not None and (source not in self.arms or self.arms[source].learning_rate_of is not None):
                raise ValueError(f"arms.{name}.learning_rate_of = {source!r} must name an arm that is tuned itself")
            self._check_search(name, arm)
        self._check_overrides()
        return self

    def _check_overrides(self) -> None:
        """Raises ValueError for overrides without an effect, since the study sets the same setting for each run."""
        tables = {"overrides": (self.overrides, self.search.settings if self.search else {})}
        tables |= {
            f"arms.{name}.overrides": (arm.overrides, search_space(self, arm.learning_rate_of or name))
            for name, arm in self.arms.items()
        }
        for table, (overrides, own) in tables.items():
            for path in (text.partition("=")[0].strip() for text in overrides):
                if path in own or path in _OF_EACH_RUN:
                    by = "tuning" if path in own or path == _RATE else "the study"
                    raise ValueError(f"{table}: {path} is set by {by} in every run; remove the override")

    def _check_search(self, name: str, arm: Arm) -> None:
        """Names of settings and values become parts of a folder's name."""
        if arm.search and (self.search is None or arm.learning_rate_of is not None):
            raise ValueError(f"arms.{name}.search needs the study's [search], and an arm that is tuned itself")
        settings = {**(self.search.settings if self.search else {}), **arm.search}
        if own := sorted(settings.keys() & {*_OF_EACH_RUN} - {_RATE}):
            raise ValueError(f"arms.{name}: {own[0]} is set by the study in every run; do not search over it")
        last = [path.rpartition(".")[2] for path in settings]
        if len(set(last)) < len(last):
            raise ValueError(f"arms.{name}: two searched settings end alike ({', '.join(settings)})")
        values = [value for path, values in settings.items() if path != _RATE for value in values]
        if bad := [value for value in values if not re.fullmatch(r"[A-Za-z0-9_.+-]+", str(value))]:
            raise ValueError(f"arms.{name}: {bad[0]!r} cannot be searched over; values are numbers and single words")
        rates = settings.get(_RATE, (1.0,))
        if not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates):
            raise ValueError(f"{_RATE} = {list(rates)}: learning rates must be positive numbers")
        for path, tried in settings.items():
            if len({str(Point(float(v))) if path == _RATE else _word(v) for v in tried}) < len(tried):
                raise ValueError(f"arms.{name}: {path} = {list(tried)} has a value twice; name each once")
        if (points := math.prod(map(len, settings.values()))) > MOST_POINTS:
            raise ValueError(f"arms.{name}: its search has {points} points, and at most {MOST_POINTS} are possible")

    @property
    def tested(self) -> set[str]:
        """The arms whose comparison with the baseline is tested."""
        return set(self.analysis.comparisons or self.arms) - {self.baseline}

    @property
    def tuning(self) -> Ladder | Search:
        """What arms are tuned by."""
        tuning = self.search or self.ladder
        assert tuning is not None, "checked when the study was read"
        return tuning


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
class Point:
    """What tuning chooses. settings: those besides the learning rate, as `a.b=c` with spaces between."""

    learning_rate: float
    settings: str = ""

    def __str__(self) -> str:
        """`lr-0.00048-mini_batches-4`, a part of a folder's name."""
        return "-".join([f"lr-{self.learning_rate:g}", *(word.replace("=", "-", 1) for word in self.words)])

    @property
    def words(self) -> list[str]:
        """`mini_batches=4`, …: the settings by their last names."""
        pairs = (word.partition("=") for word in self.settings.split())
        return [f"{name.rpartition('.')[2]}={value}" for name, _, value in pairs]

    @property
    def text(self) -> str:
        """`0.00048, mini_batches=4`."""
        return ", ".join([f"{self.learning_rate:g}", *self.words])


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identifies a run of a study. settings: as of a Point."""

    stage: Stage
    arm: str
    learning_rate: float
    seed: int
    settings: str = ""

    @property
    def point(self) -> Point:
        return Point(self.learning_rate, self.settings)

    @property
    def folder(self) -> str:
        """Path below the study's folder."""
        return f"{self.stage}/{self.arm}/{self.point}-seed-{self.seed}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. accuracy: of its last evaluation, in [0, 1]. diverged: its loss or gradient was not finite."""

    accuracy: float
    diverged: bool = False


Results = Mapping[RunKey, RunResult]


def pending(study: Study, results: Results) -> list[RunKey]:
    """The missing runs whose learning rate is known, in order of execution; empty when the study is complete."""
    keys: list[RunKey] = []
    for arm, settings in study.arms.items():
        point = best_point(study, arm, results)
        if point is not None:
            keys += [RunKey("report", arm, point.learning_rate, seed, point.settings) for seed in study.seeds]
        elif settings.learning_rate_of is None:
            keys += _tuning(study, arm, results)
    return [key for key in keys if key not in results]


def without_superseded(study: Study, results: Results) -> dict[RunKey, RunResult]:
    """The results without runs that the study no longer asks for: of another seed, of a point that is not searched, or
    reported ones of a point that more tuning has replaced."""
    best = {arm: best_point(study, arm, results) for arm in study.arms}
    searched = {arm: set(drawn(study, arm, study.search.rounds[0] if study.search else sys.maxsize)) for arm in best}

    def wanted(key: RunKey) -> bool:
        if key.stage == "ladder":
            return key.seed in study.tuning.seeds and key.point in searched[key.arm]
        return key.seed in study.seeds and best[key.arm] in (None, key.point)

    return {key: result for key, result in results.items() if wanted(key)}


def best_point(study: Study, arm: str, results: Results) -> Point | None:
    """The point with the highest mean accuracy, the first of several, of those that ran on most tuning seeds without
    diverging; None while unknown."""
    source = study.arms[arm].learning_rate_of
    if source is not None:
        best = best_point(study, source, results)
        factor = study.arms[arm].learning_rate_factor
        return None if best is None else Point(best.learning_rate * factor, best.settings)
    keys = _tuning(study, arm, results)
    if any(key not in results for key in keys):
        return None
    seeds = Counter(key.point for key in keys)
    found = means(results, keys)
    return max(found, key=lambda point: (found[point] > -math.inf, seeds[point], found[point]))


def means(results: Results, keys: Iterable[RunKey]) -> dict[Point, float]:
    """Mean accuracy by point over the seeds that ran; −∞ where one of them diverged."""
    ends: dict[Point, list[RunResult]] = {}
    for key in keys:
        if key in results:
            ends.setdefault(key.point, []).append(results[key])
    return {
        point: -math.inf if any(run.diverged for run in runs) else fmean(run.accuracy for run in runs)
        for point, runs in ends.items()
    }


def _tuning(study: Study, arm: str, results: Results) -> list[RunKey]:
    """An arm's tuning runs in order, as far as the results decide: to the first rung or round that is not complete."""
    keys: list[RunKey] = []

    def extend(points: Iterable[Point], seeds: Iterable[int]) -> bool:
        """Whether the results of all runs so far are known."""
        keys.extend(RunKey("ladder", arm, p.learning_rate, seed, p.settings) for seed in seeds for p in points)
        return all(key in results for key in keys)

    if study.search is not None:
        points = drawn(study, arm, study.search.rounds[0])
        for seed, count in zip(study.search.seeds, study.search.rounds, strict=True):
            found = means(results, keys)
            points = sorted(points, key=lambda point: -found.get(point, 0.0))[:count]
            if not extend(points, [seed]):
                break
    elif study.ladder is not None:
        for rate in study.ladder.learning_rates:
            if not extend([Point(rate)], study.ladder.seeds):
                break
            found = means(results, keys)
            # Only one that diverged is below 0.
            if found[Point(rate)] < max(0.0, max(found.values()) - study.ladder.drop):
                break
    return keys


def drawn(study: Study, arm: str, count: int) -> list[Point]:
    """At most `count` different points of an arm's search space; arms with one space get the same ones."""
    space = search_space(study, arm)
    sizes = [len(values) for values in space.values()]
    points = []
    for index in random.Random(study.name).sample(range(math.prod(sizes)), min(count, math.prod(sizes))):
        places = np.unravel_index(index, sizes, order="F")
        points.append(point_of({name: space[name][place] for name, place in zip(space, places, strict=True)}))
    return points


def search_space(study: Study, arm: str) -> SettingValues:
    """Values by setting that an arm is tuned over."""
    if study.search is None:
        return {_RATE: study.ladder.learning_rates if study.ladder else ()}
    return {**study.search.settings, **study.arms[arm].search}


def point_of(values: Mapping[str, Any]) -> Point:
    """The point of one value for each setting."""
    words = (f"{name}={_word(value)}" for name, value in values.items())
    return Point(float(values[_RATE]), " ".join(word for word in words if not word.startswith(f"{_RATE}=")))


def _word(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def budget(study: Study, key: RunKey) -> int:
    """Backward passes of a run."""
    return study.backward_passes if key.stage == "report" else study.tuning.backward_passes


def run_config(study: Study, key: RunKey) -> RunConfig:
    """The config of a run. Raises ConfigError for overrides that do not fit."""
    passes = budget(study, key)
    overrides = [
        *study.overrides,
        *study.arms[key.arm].overrides,
        *key.settings.split(),
        f"learner.optimizer.learning_rate={key.learning_rate!r}",
        f"seed={key.seed}",
        f"budget.backward_passes={passes}",
    ]
    learner = load_preset(study.preset, [*overrides, f"budget.steps={passes}"]).learner
    per_step = learner.rule.passes_per_step(gate_open=True)
    # A tuning run counts by its end alone.
    between = study.evaluate_every if key.stage == "report" else passes
    gate, decays = learner.rule.gate_config, learner.optimizer.schedule != "constant"
    by_passes = gate is not None and gate.can_fire  # which makes steps cheaper
    bounds = [
        f"budget.steps={passes // per_step:.0f}" if decays and not by_passes else "budget.steps=none",
        f"evaluation.every_steps={max(1, round(between / per_step))}",
        f"evaluation.every_backward_passes={between if by_passes else 'none'}",
    ]
    name = f"{study.name} {key.arm} {key.point.text} seed {key.seed}"
    config = load_preset(study.preset, [*overrides, *bounds, f'name="{name}"'])
    if not config.evaluation.benchmarks:
        raise ConfigError("evaluation.benchmarks is empty, and arms are compared by it; name at least one in overrides")
    return config


def extremes(study: Study, arm: str) -> Iterator[RunKey]:
    """Runs that have every searched value once, and the ends of learning rates and seeds, which are intervals."""
    source = study.arms[arm].learning_rate_of
    space = search_space(study, source or arm)
    factor = 1.0 if source is None else study.arms[arm].learning_rate_factor
    for number in range(max(map(len, space.values()))) if study.search else (0, -1):
        point = point_of({name: values[number % len(values)] for name, values in space.items()})
        for extreme in (min, max):
            yield RunKey("report", arm, point.learning_rate * factor, extreme(study.seeds), point.settings)
            if source is None:
                yield RunKey("ladder", arm, point.learning_rate, extreme(study.tuning.seeds), point.settings)


def check_arms(study: Study, *, run_here: Collection[str] = (), begun: bool = False) -> None:
    """Raises ConfigError for an arm that this installation cannot run, before any other arm is trained.

    run_here: arms whose files must be readable and whose components can be imported. begun: the study has runs, so that
    its budget stays as it is.
    """
    for arm in study.arms:
        try:
            for key in extremes(study, arm):
                config = run_config(study, key)
                if arm in run_here:
                    check_implementations(config, f"preset {study.preset}")
                    check_files(config, most=FIRST_ROWS).refuse()
                if key.stage == "report" and not begun:
                    _check_plateau(study, config)
        except (ConfigError, DataError) as error:
            raise ConfigError(f"arms.{arm}: {error}") from None


def _check_plateau(study: Study, config: RunConfig) -> None:
    """Raises ConfigError for a run whose last evaluation within the budget, with the look-ahead on, is before the
    plateau."""
    passes, per_step = study.backward_passes, config.learner.rule.passes_per_step(gate_open=True)
    last = passes // per_step
    if passes % per_step and config.budget.steps != last:  # else the run ends there
        every, between = config.evaluation.every_steps, config.evaluation.every_backward_passes
        last = math.ceil(last * per_step // between * between / per_step) if between else last // every * every
    start = (1 - study.analysis.plateau) * passes
    if not last or last * per_step < start - SAME:
        raise ConfigError(
            f"its last evaluation within the budget is at {last * per_step} backward passes, and the plateau is from "
            f"{start:g} to {passes}; set backward_passes to a multiple of {per_step}, the passes of its steps"
        )


def registration(study: Study, registered: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """What of a study is as registered, its dump before the first run if known, and what is exploratory."""

    def choices(dumped: Mapping[str, Any]) -> dict[str, Any]:
        analysis, tuned = dumped["analysis"], dumped.get("search") or dumped["ladder"]
        return {
            "arms": (dumped["arms"], dumped["baseline"]),
            "settings of all arms": (dumped["preset"], dumped["overrides"]),
            "seeds": (dumped["seeds"], tuned["seeds"]),
            "budgets": (dumped["backward_passes"], dumped["evaluate_every"], tuned),
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
    """(runs, backward passes) if every arm is tuned to the end of its ladder or search; an upper bound."""
    tuned = 0
    for name, arm in study.arms.items():
        if arm.learning_rate_of is None:
            points = math.prod(map(len, search_space(study, name).values()))
            rounds = study.search.rounds if study.search else [points] * len(study.tuning.seeds)
            tuned += sum(min(points, count) for count in rounds)
    reported = len(study.arms) * len(study.seeds)
    return tuned + reported, tuned * study.tuning.backward_passes + reported * study.backward_passes
