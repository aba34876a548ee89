"""Rules whose copies of shards are dropped between steps, as when a learner leaves the GPUs that engines share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.toy_learner import RankLearner, ToyLearner, quadratic
from torch import Tensor

from gxpo_trainer.config import ExtragradientRule, GxpoRule, RunConfig, SfpoRule
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.rules.controls import Extragradient
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.gxpo import GXPO, Buffers
from gxpo_trainer.rules.sfpo import SFPO

NEVER = {"mode": "never"}
RULES = {
    "gradient": (lambda: GXPO(GxpoRule(gate=NEVER)), 2),
    "displacement": (lambda: GXPO(GxpoRule(gate=NEVER, predictor="displacement")), 2),
    "rollback": (lambda: GXPO(GxpoRule(gate=NEVER, predictor="replay", probe_state="rollback")), 4),
    "one probe": (lambda: GXPO(GxpoRule(gate=NEVER, predictor="replay", probes=1)), 1),
    "sfpo": (lambda: SFPO(SfpoRule(gate=NEVER)), 1),
    "extragradient": (lambda: Extragradient(ExtragradientRule()), 3),
}


def held(value: Any) -> list[Tensor]:
    """All tensors that an object holds, itself or in lists, dictionaries and buffers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in held(item)]
    if isinstance(value, dict):
        return held(list(value.values()))
    return held(vars(value)) if isinstance(value, Buffers | GXPO | SFPO | Extragradient) else []


def learner() -> ToyLearner:
    start = torch.tensor([1.0, -2.0, 0.5])
    return ToyLearner(start, quadratic(torch.tensor([0.7, 0.2, 1.1])), "adamw", lr=0.05, weight_decay=0.01)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_drops_its_buffers_takes_the_same_steps(name: str) -> None:
    make, count = RULES[name]
    rule, twin = make(), make()
    toy, other = learner(), learner()
    for _ in range(3):
        assert rule.step(toy) == twin.step(other)
        assert torch.equal(toy.flat(), other.flat())
        assert len(held(rule)) == count
        rule.release_buffers()
        assert held(rule) == []


class ParkedLearner(RankLearner):
    def park(self, others: Any = ()) -> int:
        return 17


@pytest.mark.parametrize("rule", [GXPO(GxpoRule(gate=NEVER)), GRPO()])
def test_a_rank_drops_the_buffers_of_its_rule_when_it_parks(rule: Any) -> None:
    rank = LearnerRank(RunConfig(), 0, 1)
    rank.learner = ParkedLearner(torch.tensor([1.0]), quadratic(torch.tensor([1.0])))  # type: ignore[assignment]
    rank.rule, rank.perturbation = rule, None
    rule.step(rank.learner)
    assert rank.park() == 17
    assert held(rule) == []
