"""A rule registered at run time is planned like the others, with the passes and buffers that it declares."""

from __future__ import annotations

from typing import ClassVar, Literal

from support.registered_rule import registered
from support.small_plan import EXACT, small

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.config.rules import Family, PassCount
from gxpo_trainer.planner import make_plan


class Thrice(RuleSettings):
    """Three passes and five buffers."""

    label: ClassVar[str] = "Thrice"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "nowhere:Thrice"
    passes: ClassVar[PassCount] = PassCount(3)

    name: Literal["thrice"] = "thrice"

    def shard_buffers(self, num_moments: int) -> int:
        return 5


def test_a_new_rule_stands_extended_the_others_with_its_own_buffers() -> None:
    with registered(Thrice):
        extended = make_plan(small(), EXACT)
        own = make_plan(small(rule=Thrice()), EXACT)
    assert [rule.label for rule in extended.rules] == ["GRPO", "SFPO K=3", "GXPO K=5", "Thrice"]
    (planned,) = (rule for rule in own.rules if rule.own)
    assert (planned.label, planned.backward_passes) == ("Thrice", 30)
    assert own.fit.phases[0].parts["rule buffers"] == 5 * 4 * 724
