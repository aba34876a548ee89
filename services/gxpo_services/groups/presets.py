"""Sweep presets: the paper's ablations, and the rules with a learning-rate control."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gxpo_services.api.errors import Invalid
from gxpo_services.groups.schemas import SweepPreset, SweepPresetView
from gxpo_trainer.config import RuleSettings, RunConfig
from gxpo_trainer.config.messages import config_error
from gxpo_trainer.config.rules import RULES, compared_rules, in_words, rule_labels, rule_name

_PRESETS = (
    SweepPresetView(
        name="alpha",
        summary="Reposition strength α at each depth K (the paper's Table 5).",
        grid={"learner.rule.k": [3, 5, 10], "learner.rule.alpha": [0.1, 0.5, 1.0]},
        control=False,
    ),
    SweepPresetView(
        name="k",
        summary="Virtual depth K, as in the paper's main results.",
        grid={"learner.rule.k": [3, 5, 10]},
        control=False,
    ),
    SweepPresetView(
        name="tau",
        summary="Threshold τ of the gate at K = 5 (the paper's ablation).",
        grid={"learner.rule.k": [5], "learner.rule.gate.threshold": [0.7, 1.0, 1.5, 2.0]},
        control=False,
    ),
    SweepPresetView(
        name="rules",
        summary=f"{in_words(rule_labels(), 'and')} with the base's K and α, and GRPO at learning rate × (αK + 1), to "
        "rule out that a gain comes from the longer step alone.",
        grid={},
        control=True,
    ),
)
PRESETS: dict[SweepPreset, SweepPresetView] = {preset.name: preset for preset in _PRESETS}


def rule_variants(base: RunConfig) -> list[tuple[RunConfig, dict[str, Any]]]:
    """The base with each rule, and its distinguishing settings. Raises Invalid for a base without a look-ahead."""
    rule = base.learner.rule
    if not rule.sweep_base:
        bases = in_words([f'"{rule_name(other)}"' for other in RULES if other.sweep_base])
        message = f'is "{rule.name}"; preset rules takes K, α and the gate from a base with rule {bases}'
        raise Invalid.of("config.learner.rule.name", message)
    return [
        (
            base.model_copy(update={"learner": base.learner.model_copy(update={"rule": _adapted(other, rule)})}),
            {"learner.rule.name": rule_name(other)},
        )
        for other in compared_rules()
    ]


def _adapted(rule: type[RuleSettings], base: RuleSettings) -> RuleSettings:
    try:
        return rule.adapted_from(base)
    except ValidationError as error:
        message = f"does not fit rule {rule_name(rule)}: {config_error(error, 'it')}"
        raise Invalid.of("config.learner.rule", message) from None
