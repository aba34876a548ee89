"""Differences between compared runs: in conditions, which invalidate a comparison, and in settings under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gxpo_trainer.compare.curves import RunCurves
from gxpo_trainer.compare.seeds import SeedGroup

UNSTATED = "unknown"


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that differs between groups. values: group name → its values."""

    setting: str
    values: dict[str, tuple[str, ...]]
    hardware: bool


def find_differences(groups: Sequence[SeedGroup], baseline: str | None = None) -> list[Difference]:
    """Conditions and hardware in which a group differs from the baseline (by default the first group).

    Runs are compared with the baseline's run of the same seed, because some conditions depend on the seed (generated
    problems); without a shared seed the sets of values are compared. A missing setting counts as `unknown`.
    """
    reference = next((group for group in groups if group.name == baseline), groups[0])
    found = []
    for hardware in (False, True):
        stated = {group.name: {run.seed: _stated(run, hardware) for run in group.runs} for group in groups}
        settings = sorted({key for runs in stated.values() for values in runs.values() for key in values})
        for setting in settings:
            by_seed = {
                name: {seed: values.get(setting, UNSTATED) for seed, values in runs.items()}
                for name, runs in stated.items()
            }
            if any(_unequal(values, by_seed[reference.name]) for values in by_seed.values()):
                shown = {name: tuple(dict.fromkeys(values.values())) for name, values in by_seed.items()}
                found.append(Difference(setting, shown, hardware))
    return found


def differing_settings(configs: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """Setting → group → value (JSON text, None if missing), for the settings that differ between groups."""
    names = dict.fromkeys(name for config in configs.values() for name in config)
    rows = {name: {group: config.get(name) for group, config in configs.items()} for name in names}
    return {name: values for name, values in rows.items() if len(set(values.values())) > 1}


def _stated(run: RunCurves, hardware: bool) -> Mapping[str, str]:
    return run.hardware if hardware else run.conditions


def _unequal(values: Mapping[int, str], reference: Mapping[int, str]) -> bool:
    shared = values.keys() & reference.keys()
    if shared:
        return any(values[seed] != reference[seed] for seed in shared)
    return set(values.values()) != set(reference.values())
