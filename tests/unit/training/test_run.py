"""What is checked and built before engines start: memory by the planner, and the order in which the parts start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gxpo_trainer.algo.batch import shard
from gxpo_trainer.config import RunConfig, TeacherConfig
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.data.prompts import TokenizedPrompts
from gxpo_trainer.errors import ConfigError, WeightSyncMismatch
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import reserve
from gxpo_trainer.training.controller import Controller, Counters
from gxpo_trainer.training.proofs import canary, check_gap
from gxpo_trainer.training.run import Fit, build_runtime, check_memory
from gxpo_trainer.types import Prompt

CLUSTER = {"CPU": 64.0, "GPU": 4.0}
L4, H200 = {"accelerator_type:L4": 1.0}, {"accelerator_type:H200": 1.0}
A100, LABELLED_80G = {"accelerator_type:A100": 1.0}, {"accelerator_type:A100-80G": 1.0}


def a_run(folder: Path, layers: int) -> Placement:
    """A model of 70 million parameters a layer on four shared GPUs."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers, **sizes}))
    return Placement(load_preset("paper-1.5b"), "gpu", 1, 1, colocated=True)


def test_a_decay_and_evaluations_by_backward_passes_go_on_evenly_when_a_gate_fires() -> None:
    settings = {"learning_rate": 1.0, "schedule": "linear", "warmup_steps": 2}
    config = RunConfig.model_validate(
        {"learner": {"rule": {"name": "gxpo"}, "optimizer": settings}, "budget": {"backward_passes": 16}}
    )
    # Four steps of three passes, two of them warm-up, then four of one: 16 passes are 16/3 steps with the look-ahead
    # on, so that after the warm-up 10/3 are left, and each pass is a tenth of the decay.
    counters, rates, evaluated = Counters(), [], []
    for passes in (3, 3, 3, 3, 1, 1, 1, 1):
        rates.append(counters.learning_rate(config))
        done = counters.backward_passes + passes
        counters = replace(counters, step=counters.step + 1, backward_passes=done, step_passes=passes)
        evaluated += [done] if counters.reached_multiple(5) else []
    assert rates == pytest.approx([0.5, 1, 1, 0.7, 0.4, 0.3, 0.2, 0.1])
    assert evaluated == [6, 12, 15]
    assert counters.reached(config) == "backward_passes"
    whole = {"learner": {"rule": {"name": "gxpo"}, "optimizer": settings}}
    by_steps, by_passes = (
        RunConfig.model_validate(whole | {"budget": b}) for b in ({"steps": 6}, {"backward_passes": 18})
    )
    for step in range(6):  # without a gate that fires both are the same
        counters = Counters(step=step, backward_passes=3.0 * step)
        assert counters.learning_rate(by_passes) == pytest.approx(counters.learning_rate(by_steps))
    with pytest.raises(ValueError, match=r"set budget.steps or budget.backward_passes, or schedule"):
        RunConfig.model_validate(whole | {"budget": {"tokens": 10}})


def test_thirds_of_passes_reach_their_multiples() -> None:
    assert Counters(backward_passes=14.999999999999998, step_passes=1 / 3).reached_multiple(15)
    assert not Counters(backward_passes=15.333333333333332, step_passes=1 / 3).reached_multiple(15)


def test_what_fits_or_is_not_known_is_not_refused(tmp_path: Path) -> None:
    placement = a_run(tmp_path, layers=28)
    check_memory(placement, str(tmp_path), CLUSTER | H200)
    check_memory(placement, str(tmp_path), CLUSTER)
    check_memory(placement, str(tmp_path / "nothing"), CLUSTER | L4)
    assert check_memory(replace(placement, device="cpu"), str(tmp_path), CLUSTER | L4) == Fit()
    taught = placement.config.model_copy(update={"teacher": TeacherConfig(path="org/unknown")})
    assert check_memory(replace(placement, config=taught), str(tmp_path), CLUSTER | L4) == Fit()


def test_a_name_of_several_memory_sizes_refuses_only_what_fits_none_of_them(tmp_path: Path) -> None:
    # 80 layers of 67 million parameters, 5.5 billion with the embeddings: masters, gradients, moments and GXPO's two
    # buffers are 24 bytes a parameter, over four ranks 31 GiB; with 10 GiB of bf16 weights too much for 40 GB.
    placement = a_run(tmp_path, layers=80)
    check_memory(placement, str(tmp_path), CLUSTER | A100)
    with pytest.raises(ConfigError, match=r"a100-80 has 79\.3 GiB; "):
        check_memory(a_run(tmp_path, layers=200), str(tmp_path), CLUSTER | A100)


def test_recomputation_and_micro_batches_are_decided_by_the_smallest_memory(tmp_path: Path) -> None:
    placement = a_run(tmp_path, layers=28)
    learner = placement.config.learner.model_copy(update={"token_budget": "auto"})
    automatic = placement.config.model_copy(update={"learner": learner})
    placement = replace(placement, config=automatic)
    large, middle, smallest = (
        check_memory(placement, str(tmp_path), CLUSTER | kind) for kind in (H200, A100 | LABELLED_80G, A100)
    )
    assert (large.recomputes, large.token_budget) == (False, 16384)
    assert (middle.recomputes, middle.token_budget) == (False, 8192)
    assert (smallest.recomputes, smallest.token_budget) == (True, 8192)
    decided = large.decided(automatic)
    assert (decided.model.gradient_checkpointing, decided.learner.token_budget) == (False, 16384)
    assert Fit().decided(automatic) is automatic


def test_a_run_that_cannot_fit_is_refused_before_nodes_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from gxpo_trainer.runtime.placement_group import RunPlacementGroup

    requested: list[object] = []
    monkeypatch.setattr(RunPlacementGroup, "create", lambda self, bundles: requested.append(bundles))
    monkeypatch.setattr(ray, "cluster_resources", lambda: CLUSTER | L4)
    placement = a_run(tmp_path, layers=40)
    with pytest.raises(ConfigError, match=r"GiB per device and l4-24 has 22\.5 GiB; ") as caught:
        reserve(
            placement,
            owned=False,
            before_request=lambda settled, cluster: check_memory(settled, str(tmp_path), cluster),
        )
    assert requested == []
    assert caught.value.reason == "no_resources"


@pytest.mark.parametrize("resident", [True, False])
def test_engines_measure_gpus_before_the_ranks(resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sizes its KV cache by the device's free memory, so a learner that loads meanwhile would shrink it."""
    config = RunConfig.model_validate({"placement": {"colocate": True}})
    placement = Placement.decide(config)
    prompts = TokenizedPrompts((Prompt("0", "", ""),), (np.ones(3, np.int32),), 0)
    runtime = build_runtime(config, placement, "model", prompts, lambda *_, **__: None, fit=Fit(resident))
    log: list[str] = []

    monkeypatch.setattr("gxpo_trainer.learner.group.ray.remote", Mock(side_effect=NotImplementedError("a rank starts")))
    monkeypatch.setattr(runtime.pool, "start", lambda: log.append("engines start"))
    monkeypatch.setattr(Engines, "await_ready", lambda self, *, every: log.append(f"await every engine: {every}"))
    controller = Controller(runtime, Mock(), Mock(out_dir=tmp_path), Mock(), Mock())
    with pytest.raises(NotImplementedError, match="a rank starts"):
        controller.run(None)
    assert log == ["engines start", "await every engine: True"]


# The canary: it perturbs the learner by as much as it takes, and a sampler that does not follow ends the run.


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


def run_canary(world: Any, **learner: Any) -> None:
    planner: Any = SimpleNamespace(token_ids=[np.arange(5), np.arange(4)])
    canary(RunConfig.model_validate({"learner": learner}), world, world, planner)


def test_the_perturbation_grows_until_it_shows() -> None:
    # An adapter's effect is the product of two perturbed factors, and bf16 rounds small ones away.
    world = World(lambda scale: scale**2 if scale > 0.05 else 0.0, noise=0.01)
    run_canary(world, **BF16)
    assert world.scales == [0.01 * 2**n for n in range(8)]
    with pytest.raises(WeightSyncMismatch, match=r"moved the learner by only 0\.01, .*proves nothing"):
        run_canary(World(lambda scale: 0.0, noise=0.01), **BF16)


def test_every_learner_rank_gets_a_prompt_of_few() -> None:
    world: Any = World(lambda scale: scale, ranks=9)
    planner: Any = SimpleNamespace(token_ids=[np.arange(5 + index) for index in range(3)])
    canary(RunConfig.model_validate({"placement": {"learner_ranks": 9}}), world, world, planner)
    assert world.scales == [0.01]


def test_a_prompt_of_one_token_which_has_no_log_probability_is_scored_twice_as_long() -> None:
    world: Any = World(lambda scale: scale)
    planner: Any = SimpleNamespace(token_ids=[np.array([5])])
    canary(RunConfig(), world, world, planner)
    assert world.scales == [0.01]


def test_a_sampler_that_stays_behind_ends_the_run_but_in_bf16_a_tenth_of_a_large_move_may_be_rounding() -> None:
    class Rounded(World):
        def sync(self, version: int) -> None:
            self.samplers = [self.learner, 0.94 * self.learner]

    run_canary(Rounded(lambda scale: 200 * scale), **BF16)  # a gap of 0.06 · 2
    with pytest.raises(WeightSyncMismatch, match="after a perturbation"):
        run_canary(Rounded(lambda scale: 200 * scale))
    for learner in ({}, BF16):
        with pytest.raises(WeightSyncMismatch, match="after a perturbation"):
            run_canary(World(lambda scale: 100 * scale, sampler_follows=False), **learner)


def test_one_outlier_of_the_gap_warns_and_its_mean_ends_the_run() -> None:
    config = RunConfig.model_validate({"learner": BF16})
    assert check_gap(config, 0.02, 4.0, 7) is None
    assert "differ by 6, above rollout.logprob_gap_max_limit" in (check_gap(config, 0.02, 6.0, 7) or "")
    for mean in (0.06, float("nan")):
        with pytest.raises(WeightSyncMismatch, match=r"step 7: .*rollout\.logprob_gap_mean_limit"):
            check_gap(config, mean, 1.0, 7)
