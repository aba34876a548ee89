"""From a study and the results so far to the runs that can start now. Pure.

Arms are executed one after the other: first an arm's ladder, upwards until its accuracy falls, then all its reported
seeds at the best rate, then what is evaluated of them. So an interrupted study has complete arms instead of many
half-finished ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.studies.definition import Study

Stage = Literal["ladder", "report", "extrapolation"]


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
        found = best_rate(study, source, results)
        return None if found is None else found * study.arms[arm].learning_rate_factor
    means: dict[float, float] = {}
    for rate in study.ladder.learning_rates:
        found_here = [results.get(key) for key in _rung(study, arm, rate)]
        known = [result for result in found_here if result is not None]
        if len(known) < len(found_here):
            return None
        means[rate] = 0.0 if any(result.diverged for result in known) else fmean(r.accuracy for r in known)
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


def largest_cost(study: Study) -> tuple[int, int]:
    """(runs, backward passes) if every ladder is climbed to its end; an upper bound. Extrapolations cost no pass."""
    tuned = sum(arm.learning_rate_of is None for arm in study.arms.values())
    rungs = tuned * len(study.ladder.learning_rates) * len(study.ladder.seeds)
    reported = len(study.arms) * len(study.seeds)
    return rungs + reported, rungs * study.ladder.backward_passes + reported * study.backward_passes


def _of_arm(study: Study, arm: str, results: Results) -> Iterator[RunKey]:
    """The runs of an arm as far as they are known: the ladder to its next open rate, then the reported seeds."""
    rate = best_rate(study, arm, results)
    if rate is not None:
        yield from (RunKey("report", arm, rate, seed) for seed in study.seeds)
        if study.extrapolation is not None and study.extrapolation.arm == arm:
            done = [seed for seed in study.seeds if RunKey("report", arm, rate, seed) in results]
            yield from (RunKey("extrapolation", arm, rate, seed) for seed in done)
    elif study.arms[arm].learning_rate_of is None:
        for step in study.ladder.learning_rates:
            rung = _rung(study, arm, step)
            yield from rung
            if any(key not in results for key in rung):
                return


def _rung(study: Study, arm: str, rate: float) -> list[RunKey]:
    return [RunKey("ladder", arm, rate, seed) for seed in study.ladder.seeds]
