"""From a rule's settings to the rule. Settings classes are registered in config/rules.py."""

from __future__ import annotations

import importlib

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.rules.base import Rule


def make_rule(settings: RuleSettings) -> Rule:
    """The rule that `learner.rule` asks for, in its starting state."""
    module, _, name = settings.implementation.partition(":")
    rule: Rule = getattr(importlib.import_module(module), name)(settings)
    return rule
