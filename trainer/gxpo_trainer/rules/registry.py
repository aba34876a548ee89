"""From a rule's settings to the rule. A new rule adds one line here."""

from __future__ import annotations

from gxpo_trainer.config import GrpoRule, GxpoRule, SfpoRule
from gxpo_trainer.rules.base import Rule
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.gxpo import GXPO
from gxpo_trainer.rules.sfpo import SFPO


def make_rule(settings: GrpoRule | SfpoRule | GxpoRule) -> Rule:
    """The rule that `learner.rule` asks for, in its starting state."""
    match settings:
        case GrpoRule():
            return GRPO(settings)
        case SfpoRule():
            return SFPO(settings)
        case GxpoRule():
            return GXPO(settings)
