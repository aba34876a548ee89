"""Sweep presets: the paper's ablations, and the rules with a learning-rate control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gxpo_services.api.errors import FieldError
from gxpo_services.configs.checks import invalid
from gxpo_services.groups.schemas import SweepPreset, SweepPresetView
from gxpo_trainer.config import GrpoRule, GxpoRule, RunConfig, SfpoGateConfig, SfpoRule

_PAPER_THRESHOLD, _PAPER_SFPO_THRESHOLD = 0.5, 2.0
"""The paper's thresholds for GXPO and SFPO."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A sweep preset. control: includes GRPO at learning rate × (αK + 1)."""

    summary: str
    grid: dict[str, list[Any]] = field(default_factory=dict)
    control: bool = False


PRESETS: dict[SweepPreset, Preset] = {
    "alpha": Preset(
        "Reposition strength α at each depth K (the paper's Table 5).",
        {"learner.rule.k": [3, 5, 10], "learner.rule.alpha": [0.1, 0.5, 1.0]},
    ),
    "k": Preset("Virtual depth K, as in the paper's main results.", {"learner.rule.k": [3, 5, 10]}),
    "tau": Preset(
        "Threshold τ of the gate at K = 5 (the paper's ablation).",
        {"learner.rule.k": [5], "learner.rule.gate.threshold": [0.7, 1.0, 1.5, 2.0]},
    ),
    "rules": Preset(
        "GRPO, SFPO and GXPO with the base's K and α, and GRPO at learning rate × (αK + 1), to rule out that a "
        "gain comes from the longer step alone.",
        control=True,
    ),
}


def preset_views() -> list[SweepPresetView]:
    return [
        SweepPresetView(name=name, summary=preset.summary, grid=preset.grid, control=preset.control)
        for name, preset in PRESETS.items()
    ]


def rule_variants(base: RunConfig) -> list[tuple[RunConfig, dict[str, Any]]]:
    """The base with each rule, and its distinguishing settings. Raises Invalid unless the base uses GXPO."""
    rule = base.learner.rule
    if not isinstance(rule, GxpoRule):
        message = f'is "{rule.name}"; preset rules takes K, α and the gate from a base with rule "gxpo"'
        raise invalid([FieldError(field="config.learner.rule.name", message=message)])
    rules = (GrpoRule(), SfpoRule(k=rule.k, alpha=rule.alpha, gate=_sfpo_gate(rule)), rule)
    return [
        (
            base.model_copy(update={"learner": base.learner.model_copy(update={"rule": other})}),
            {"learner.rule.name": other.name},
        )
        for other in rules
    ]


def _sfpo_gate(rule: GxpoRule) -> SfpoGateConfig:
    """SFPO's gate: the base's gate made two-sided, or the paper's SFPO gate if the base has the paper's GXPO gate.

    The paper's warm-up of GXPO (90 steps, inferred) applies to corrective norms, not to a gate on entropy.
    """
    if rule.gate.threshold == _PAPER_THRESHOLD:
        return SfpoGateConfig(threshold=_PAPER_SFPO_THRESHOLD, window=rule.gate.window)
    return SfpoGateConfig.model_validate(rule.gate.model_dump() | {"two_sided": True})
