"""The canary: it perturbs the learner by as much as it takes, and a sampler that does not follow ends the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gxpo_trainer.algo.batch import shard
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.training.proofs import canary, check_gap

BF16 = {"precision": "bf16", "zero_stage": 1}


class World:
    """A learner and a sampler whose log-probabilities are one number each: `effect(scale)` of the perturbation."""

    def __init__(self, effect: Any, noise: float = 0.0, sampler_follows: bool = True, ranks: int = 1) -> None:
        self.effect, self.noise, self.follows, self.ranks = effect, noise, sampler_follows, ranks
        self.learner = 0.0
        self.samplers = [0.0, 0.0]
        self.scales: list[float] = []

    # LearnerGroup
    def perturb(self, scale: float, seed: int) -> None:
        self.scales.append(scale)
        self.learner = self.effect(scale)

    def restore(self) -> None:
        self.learner = 0.0

    def gap(self, batch: Any) -> tuple[float, float]:
        held = [sequence for share in shard(batch, self.ranks) for sequence in share.sequences]
        gaps = [abs(self.learner - float(s.sampler_logprobs[0])) + self.noise for s in held]
        return sum(gaps) / len(gaps), max(gaps)

    # RolloutPool of two engines, of which the second may stay behind.
    def sync(self, version: int) -> None:
        self.samplers = [self.learner, self.learner if self.follows else self.samplers[1]]

    def score(self, prompts: list[Any], version: int) -> list[Any]:
        return [[np.full(len(ids) - 1, held, dtype=np.float32) for ids in prompts] for held in self.samplers]


def run_canary(world: Any, **learner: Any) -> dict[str, float]:
    planner: Any = SimpleNamespace(token_ids=[np.arange(5), np.arange(4)])
    return canary(RunConfig.model_validate({"learner": learner}), world, world, planner)


def test_the_perturbation_grows_until_it_shows() -> None:
    # An adapter's effect is the product of two perturbed factors, and bf16 rounds small ones away.
    world = World(lambda scale: scale**2 if scale > 0.05 else 0.0, noise=0.01)
    gaps = run_canary(world, **BF16)
    assert world.scales == [0.01 * 2**n for n in range(8)]
    assert gaps["moved"] == pytest.approx(0.01 + 1.28**2)
    assert gaps["sampler_moved"] == pytest.approx(1.28**2)


def test_one_perturbation_is_enough_where_it_shows_at_once() -> None:
    world = World(lambda scale: scale)
    run_canary(world)
    assert world.scales == [0.01]


def test_weights_that_no_perturbation_moves_end_the_run() -> None:
    with pytest.raises(WeightSyncMismatch, match=r"moved the learner by only 0\.01, .*proves nothing"):
        run_canary(World(lambda scale: 0.0, noise=0.01), **BF16)


@pytest.mark.parametrize("prompts", [3, 20])
def test_every_learner_rank_gets_a_prompt(prompts: int) -> None:
    world = World(lambda scale: scale, ranks=9)
    planner: Any = SimpleNamespace(token_ids=[np.arange(5 + index) for index in range(prompts)])
    canary(RunConfig.model_validate({"placement": {"learner_ranks": 9}}), world, world, planner)
    assert world.scales == [0.01]


@pytest.mark.parametrize("learner", [{}, BF16])
def test_a_sampler_that_stays_behind_ends_the_run(learner: dict[str, Any]) -> None:
    with pytest.raises(WeightSyncMismatch, match="after a perturbation"):
        run_canary(World(lambda scale: 100 * scale, sampler_follows=False), **learner)


def test_in_bf16_a_large_move_may_leave_a_tenth_of_it_to_rounding() -> None:
    class Rounded(World):
        def sync(self, version: int) -> None:
            self.samplers = [self.learner, 0.94 * self.learner]

    assert run_canary(Rounded(lambda scale: 200 * scale), **BF16)["perturbed"] == pytest.approx(0.12)
    with pytest.raises(WeightSyncMismatch, match="after a perturbation"):
        run_canary(Rounded(lambda scale: 200 * scale))


def test_one_outlier_of_the_gap_warns() -> None:
    config = RunConfig.model_validate({"learner": BF16})
    assert check_gap(config, 0.02, 4.0, 7) is None
    warning = check_gap(config, 0.02, 6.0, 7)
    assert warning is not None
    assert "6" in warning
    assert "rollout.logprob_gap_max_limit" in warning


@pytest.mark.parametrize("mean", [0.06, float("nan")])
def test_the_mean_of_the_gap_ends_the_run(mean: float) -> None:
    with pytest.raises(WeightSyncMismatch, match=r"step 7: .*rollout\.logprob_gap_mean_limit"):
        check_gap(RunConfig.model_validate({"learner": BF16}), mean, 1.0, 7)
