"""The paper's ablations as sweeps, and the rules beside each other with their control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gxpo_services.api.errors import FieldError
from gxpo_services.configs.checks import invalid
from gxpo_services.groups.schemas import SweepPreset, SweepPresetView
from gxpo_trainer.config import GrpoRule, GxpoRule, RunConfig, SfpoGateConfig, SfpoRule

_PAPER_THRESHOLD, _PAPER_SFPO_THRESHOLD = 0.5, 2.0
"""The paper's τ for GXPO, and the one that it ran SFPO with."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A ready-made sweep. control: GRPO at learning rate × (αK + 1) belongs to it."""

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
        "GRPO, SFPO and GXPO with the base's K and α, and GRPO at learning rate × (αK + 1): a gain counts only when "
        "this longer step does not have it too.",
        control=True,
    ),
}


def preset_views() -> list[SweepPresetView]:
    return [
        SweepPresetView(name=name, summary=preset.summary, grid=preset.grid, control=preset.control)
        for name, preset in PRESETS.items()
    ]


def rule_variants(base: RunConfig) -> list[tuple[RunConfig, dict[str, Any]]]:
    """The base by each rule, with what sets it apart. Raises Invalid for a base whose rule has no K and α of GXPO."""
    rule = base.learner.rule
    if not isinstance(rule, GxpoRule):
        message = f'is "{rule.name}"; preset rules takes K, α and the gate from a base with "gxpo"'
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
    """The base's gate, two-sided as SFPO's is; beside the paper's GXPO, the gate that the paper ran SFPO with.

    The paper's warm-up of GXPO (90 steps, inferred) is about corrective norms and not for a gate on entropy.
    """
    if rule.gate.threshold == _PAPER_THRESHOLD:
        return SfpoGateConfig(threshold=_PAPER_SFPO_THRESHOLD, window=rule.gate.window)
    return SfpoGateConfig.model_validate(rule.gate.model_dump() | {"two_sided": True})
