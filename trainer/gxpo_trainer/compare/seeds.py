"""Seed groups: runs grouped and named by configuration, and what differs between them. Pure.

Unequal conditions invalidate a comparison; settings under test may differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves, mean_curve
from gxpo_trainer.compare.rows import flatten, is_condition
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import DataError

_RATE = "learner.optimizer.learning_rate"
_TUNED = ("learner.mini_batches", "learner.optimizer.schedule", "learner.optimizer.warmup_steps")
"""Settings that belong to the rate."""
_SCHEDULE = ("evaluation.every_steps", "evaluation.every_backward_passes")
_UNCOMPARED = ("name", "seed", "logging", "timeouts")
_LONGEST_VALUE = 40
"""Characters of a setting's value in a group's name."""


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that differ only in their seed, at least one."""

    name: str
    runs: tuple[RunCurves, ...]

    @functools.cached_property
    def mean(self) -> EvaluationCurve:
        """`mean_curve` of the runs. Raises DataError where their seeds share no evaluation."""
        try:
            return mean_curve([run.curve for run in self.runs])
        except ValueError as error:
            raise DataError(f"{self.name}: {error}") from None

    @property
    def by_seed(self) -> dict[int, RunCurves]:
        return {run.seed: run for run in self.runs}


def group_by_config(runs: Sequence[tuple[RunCurves, Mapping[str, Any]]]) -> list[SeedGroup]:
    """Group runs whose configs differ only in name and seed, in order of appearance.

    Groups are named by their rule, plus the learning rate and other settings in which groups differ. Raises DataError
    when a group has a seed twice.
    """
    configs: dict[str, dict[str, str]] = {}
    members: dict[str, list[RunCurves]] = {}
    for run, config in runs:
        key = config_key(config)
        configs[key] = _settings(config)
        if any(run.seed == other.seed for other in members.setdefault(key, [])):
            raise DataError(f"{run.name}: another run has the same config and seed {run.seed}; remove one of the two")
        members[key].append(run)
    labels = group_labels({key: group[0].rule for key, group in members.items()}, configs)
    return [SeedGroup(labels[key], tuple(group)) for key, group in members.items()]


def config_key(config: Mapping[str, Any]) -> str:
    """Hash of a config without name, seed and trackers; a setting that its version did not have has its default."""
    return hashlib.sha256(json.dumps(_settings(config), sort_keys=True).encode()).hexdigest()


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings by which runs are grouped, of a config of any version."""
    of_run = flatten({name: value for name, value in config.items() if name not in _UNCOMPARED})
    return {name: value for name, value in _defaults().items() if name.partition(".")[0] not in _UNCOMPARED} | of_run


def condition_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a config of any version in which runs must be equal if only rules and rates are to differ."""
    settings = _settings(config)
    names = (name for name in settings if name in _TUNED or (is_condition(name) and name not in _SCHEDULE))
    return {name: settings[name] for name in names}


def group_labels(rules: Mapping[str, str], configs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """A unique name for each key, from its rule and the (flat) settings that differ."""
    rates = {key: config.get(_RATE) for key, config in configs.items()}
    several = len(set(rates.values())) > 1
    tuned = [name for name in _TUNED if len({config.get(name) for config in configs.values()}) > 1]
    labels = {
        key: rule + (f" lr {float(rate):g}" if several and (rate := rates[key]) is not None else "")
        for key, rule in rules.items()
    }
    labels = {key: " ".join([label, *(_word(name, configs[key]) for name in tuned)]) for key, label in labels.items()}
    for label in dict.fromkeys(labels.values()):
        same = [key for key in rules if labels[key] == label]
        if len(same) > 1:
            labels |= _disambiguate(label, {key: configs[key] for key in same})
    return labels


def _disambiguate(label: str, configs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The label with enough differing settings to be unique, the rule's first, or else with numbers."""
    names = dict.fromkeys(name for config in configs.values() for name in config)
    differ = [n for n in names if n != _RATE and len({config.get(n) for config in configs.values()}) > 1]
    differ.sort(key=lambda name: not name.startswith("learner.rule."))
    labels = dict.fromkeys(configs, label)
    for num in range(min(2, len(differ)), len(differ) + 1):
        labels = {key: " ".join([label, *(_word(n, config) for n in differ[:num])]) for key, config in configs.items()}
        if len(set(labels.values())) == len(labels):
            return labels
    return {key: f"{name} #{number}" for number, (key, name) in enumerate(labels.items(), start=1)}


def _word(name: str, config: Mapping[str, str]) -> str:
    text = str(config.get(name))
    shown = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return f"{name.removeprefix('learner.').removeprefix('rule.')}={shown}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that differs between groups. values: group name → its values."""

    setting: str
    values: dict[str, tuple[str, ...]]
    hardware: bool


def schedule_note(groups: Sequence[SeedGroup], reference: SeedGroup) -> str:
    """Which groups were evaluated at other passes than the reference, or that all were at the same although their
    schedules differ; empty where neither is so."""
    other: list[str] = []
    for group in groups:
        for run in group.runs:
            # As far as both went; sums of thirds of a pass differ in their last digits.
            pair = (run, reference.by_seed.get(run.seed, reference.runs[0]))
            own, its = (np.round(one.curve.backward_passes, 6) for one in pair)
            end = min(own[-1], its[-1])
            if not np.array_equal(own[own <= end], its[its <= end]) and group.name not in other:
                other.append(group.name)
    if other:
        return (
            f"{' and '.join(other)} {'was' if len(other) == 1 else 'were'} evaluated at other backward passes than "
            f"{reference.name}: at an equal budget the last evaluation within it counts, a target is reached at an "
            "evaluation of the common grid, and plateaus are those of shared evaluations; nothing is interpolated. To "
            "share more of them, set evaluation.every_backward_passes alike."
        )
    runs = [run for group in groups for run in group.runs]
    if len({tuple(run.conditions.get(name, _defaults()[name]) for name in _SCHEDULE) for run in runs}) > 1:
        return "Evaluation schedules differ as the rules' steps do: all were evaluated at the same backward passes."
    return ""


def find_differences(groups: Sequence[SeedGroup], baseline: str | None = None) -> list[Difference]:
    """Conditions and hardware in which a group differs from the baseline (by default the first group).

    How many steps lie between evaluations is no condition: costs are compared where all were evaluated (schedule_note).

    Runs are compared with the baseline's run of the same seed, because some conditions depend on the seed (generated
    problems); without a shared seed the sets of values are compared. A setting that a run's version did not have counts
    as the default, anything else that is missing as `unknown`.
    """
    baseline, differences = baseline or groups[0].name, []
    for hardware in (False, True):
        stated = {
            group.name: {run.seed: run.hardware if hardware else run.conditions for run in group.runs}
            for group in groups
        }
        settings = sorted(
            {key for runs in stated.values() for values in runs.values() for key in values} - {*_SCHEDULE}
        )
        for setting in settings:
            absent = _defaults().get(setting, "unknown")
            by_seed = {
                name: {seed: values.get(setting, absent) for seed, values in runs.items()}
                for name, runs in stated.items()
            }
            if any(_unequal(values, by_seed[baseline]) for values in by_seed.values()):
                unique = {name: tuple(dict.fromkeys(values.values())) for name, values in by_seed.items()}
                differences.append(Difference(setting, unique, hardware))
    return differences


@functools.cache
def _defaults() -> dict[str, str]:
    return flatten(RunConfig().model_dump(mode="json"))


def _unequal(values: Mapping[int, str], reference: Mapping[int, str]) -> bool:
    shared = values.keys() & reference.keys()
    if shared:
        return any(values[seed] != reference[seed] for seed in shared)
    return set(values.values()) != set(reference.values())
