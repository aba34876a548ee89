"""Several rule steps a training step: the gate judges once, and the step's metrics are those of all of them."""

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


class MiniBatchLearner(RankLearner):
    """Mini-batch i has the gradient `slopes[i]`, whatever θ is."""

    def __init__(self, slopes: list[float], entropies: list[float] | None = None) -> None:
        super().__init__(torch.tensor([1.0]), lambda theta, _: [torch.tensor([slopes[self.index]])], lr=0.01)
        if entropies is not None:
            self._entropy = lambda _: entropies[self.index]


def rank_with(rule: Any, learner: Any) -> LearnerRank:
    rank = LearnerRank(RunConfig(), 0, 1)
    rank.learner, rank.rule = learner, rule
    return rank


def train(rank: LearnerRank, batches: int) -> Any:
    return rank.train_step([None] * batches, 0.01, diagnose=False)  # type: ignore[list-item]


def test_metrics_are_means_over_mini_batches_and_passes_sums() -> None:
    rank = rank_with(GXPO(GxpoRule(gate={"mode": "never"})), MiniBatchLearner([1.0, 5.0]))
    result = train(rank, 2)
    assert result.metrics["grad/norm_g0"] == 3.0
    assert result.metrics["policy/pass2/loss"] == 0.0
    # Three steps of 0.01 · g each; a constant gradient extrapolates two of them to five, α = 0.5: 2.5 + 1 steps.
    assert result.metrics["update/norm"] == pytest.approx((0.035 + 0.175) / 2)
    assert result.backward_passes == 3  # six passes over halves of the batch
    assert rank.rule.num_steps == 1  # type: ignore[attr-defined]


def test_the_entropy_gate_judges_the_mean_entropy_with_the_last_mini_batch() -> None:
    rule = SFPO(SfpoRule(k=2, gate={"warmup": 2, "threshold": 3.0}))
    entropies = [1.0, 2.0]
    rank = rank_with(rule, MiniBatchLearner([1.0, 1.0], entropies))
    assert [train(rank, 2).backward_passes for _ in range(2)] == [3, 3]
    assert rule.gate.state.window == [1.5, 1.5]
    entropies[:] = [0.0, 0.5]
    fired = train(rank, 2)
    assert (fired.metrics["gate/value"], fired.metrics["gate/shutoff_step"]) == (0.25, 3)
    assert fired.backward_passes == 2  # three passes over the first half, one over the last


def test_the_gate_judges_the_mean_norm_of_a_step_once_and_of_plain_steps_where_it_may_rearm() -> None:
    rule = GXPO(
        GxpoRule(gate={"mode": "rearm", "warmup": 2, "threshold": 3.0, "rearm_threshold": 1.0, "rearm_after": 2})
    )
    learner = MiniBatchLearner([1.0, 5.0])
    rank = rank_with(rule, learner)
    steady = learner._gradient
    first, second = train(rank, 2), train(rank, 2)
    assert rule.gate.state.window == [3.0, 3.0]
    assert (first.metrics["gate/value"], second.metrics["gate/mean"]) == (3.0, 3.0)
    assert "gate/z" not in second.metrics  # two steps, not four mini-batches: the warm-up is just over
    learner._gradient = lambda theta, _: [torch.tensor([20.0])]
    third = train(rank, 2)
    assert (third.metrics["gate/active"], third.metrics["gate/shutoff_step"]) == (0.0, 3)
    assert third.backward_passes == 3  # the step that fires the gate looks ahead on all of its mini-batches
    learner._gradient = steady
    plain = [train(rank, 2) for _ in range(2)]
    assert [p.backward_passes for p in plain] == [1, 1]
    assert [p.metrics["gate/value"] for p in plain] == [3.0, 3.0]
    assert [p.metrics["gate/active"] for p in plain] == [0.0, 1.0]


def test_a_warm_start_leaves_no_trace_in_the_rule_and_the_next_step_starts_from_a_fresh_optimizer() -> None:
    learner = MiniBatchLearner([1.0])
    resets: list[int] = []
    learner.reset_optimizer = lambda: resets.append(1)
    rank = rank_with(GXPO(GxpoRule(k=5)), learner)
    before = rank.rule.state_dict()
    supervised = rank.train_step([None], 0.01, diagnose=False, stage="warm_start")  # type: ignore[list-item]
    assert (supervised.backward_passes, rank.rule.state_dict(), resets) == (1, before, [])
    first = rank.train_step([None], 0.01, diagnose=False, stage="first")  # type: ignore[list-item]
    assert (first.backward_passes, resets) == (3, [1])


# Rules whose copies of shards are dropped between steps, as when a learner leaves the GPUs that engines share.


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


@pytest.mark.parametrize("rule", [GXPO(GxpoRule(gate=NEVER)), GRPO()])
def test_a_rank_drops_the_buffers_of_its_rule_when_it_parks(rule: Any) -> None:
    rank = rank_with(rule, MiniBatchLearner([1.0]))
    rank.learner.park = lambda: 17  # type: ignore[method-assign]
    rule.step(rank.learner)
    assert rank.park() == 17
    assert held(rule) == []
