"""Groups runs by configuration, names the groups and computes bands over seeds. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gxpo_trainer.compare.curves import EvaluationCurve, Floats, RunCurves
from gxpo_trainer.compare.intervals import mean_interval
from gxpo_trainer.compare.rows import flatten
from gxpo_trainer.errors import DataError

_RATE = "learner.optimizer.learning_rate"
_LONGEST_VALUE = 40
"""Characters of a setting's value in a group's name."""


@dataclass(frozen=True, slots=True, eq=False)
class SeedGroup:
    """Runs that differ only in their seed. Raises ValueError when empty or a seed occurs twice."""

    name: str
    runs: tuple[RunCurves, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"group {self.name!r} has no run")
        if len({run.seed for run in self.runs}) < len(self.runs):
            raise ValueError(f"group {self.name!r} has a seed twice: {[run.seed for run in self.runs]}; drop one run")

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
        if key not in configs:
            configs[key] = flatten(_body(config))
        if any(run.seed == other.seed for other in members.setdefault(key, [])):
            raise DataError(f"{run.name}: another run has the same config and seed {run.seed}; remove one of the two")
        members[key].append(run)
    labels = group_labels({key: found[0].rule for key, found in members.items()}, configs)
    return [SeedGroup(labels[key], tuple(found)) for key, found in members.items()]


def config_key(config: Mapping[str, Any]) -> str:
    """Hash of a config without name and seed."""
    return hashlib.sha256(json.dumps(_body(config), sort_keys=True).encode()).hexdigest()


def group_labels(rules: Mapping[str, str], configs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """A unique name for each key, from its rule and the (flat) settings that differ."""
    rates = {key: config.get(_RATE) for key, config in configs.items()}
    several = len(set(rates.values())) > 1
    labels = {
        key: rule + (f" lr {float(rate):g}" if several and (rate := rates[key]) is not None else "")
        for key, rule in rules.items()
    }
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
    found = dict.fromkeys(configs, label)
    for count in range(min(2, len(differ)), len(differ) + 1):
        found = {key: " ".join([label, *(_word(n, config) for n in differ[:count])]) for key, config in configs.items()}
        if len(set(found.values())) == len(found):
            return found
    return {key: f"{name} #{number}" for number, (key, name) in enumerate(found.items(), start=1)}


def _word(name: str, config: Mapping[str, str]) -> str:
    value = str(config.get(name))
    short = value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"
    return f"{name.removeprefix('learner.rule.')}={short}"


def seed_band(group: SeedGroup, curve: EvaluationCurve, level: float = 0.95) -> tuple[Floats, Floats]:
    """Bounds at each evaluation of the group's mean curve, clipped to [0, 1]; NaN if unknown.

    The interval over problems for a single seed, else the t-interval over seeds.
    """
    if len(group.runs) == 1:
        return curve.ci_low, curve.ci_high
    low, high = [], []
    for step in curve.steps:
        values = [float(run.curve.accuracy[np.searchsorted(run.curve.steps, step)]) for run in group.runs]
        interval = mean_interval(values, level)
        low.append(interval.low)
        high.append(interval.high)
    return np.clip(np.array(low, dtype=np.float64), 0, 1), np.clip(np.array(high, dtype=np.float64), 0, 1)


def _body(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("name", "seed")}
