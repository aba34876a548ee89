"""Seconds of a step by hand, on devices of 1 and 2 GFLOP/s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.small_plan import CPU, EXACT, small

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.planner import timing
from gxpo_trainer.planner.inputs import workload_of

FORWARD = 240 * (2 * 1184 + 4 * 2 * 8 * 15) + 160 * 2 * 256
"""8 rows of 30 tokens through 2 · 592 parameters, attending to 15 on average; logits of 160 response tokens."""


def test_flops_of_a_pass() -> None:
    inputs = small()
    load = workload_of(inputs, EXACT)
    assert timing.forward_flops(inputs, load) == FORWARD
    assert timing.pass_flops(inputs, load) == 3 * FORWARD
    assert timing.pass_flops(replace(inputs, checkpointing=True), load) == 4 * FORWARD
    assert timing.pass_flops(replace(inputs, adapter_rank=4), load) == 2 * FORWARD


def test_ranks_share_a_pass_on_gpus_and_a_host_is_one_device() -> None:
    inputs = small(zero_stage=0, precision="bf16", learner_ranks=1)
    load = workload_of(inputs, EXACT)
    # 8 rows, two in a micro-batch.
    assert load.micro_batches == 4
    assert timing.pass_seconds(inputs, EXACT, load) == pytest.approx(3 * FORWARD / 2e9 / 0.5 + 4 * 0.25)
    two = replace(inputs, learner_ranks=2)
    reduced = 2 * 0.5 * 4 * 1448 / 1e8
    expected = 3 * FORWARD / 4e9 / 0.5 + 2 * 0.25 + reduced
    assert timing.pass_seconds(two, EXACT, workload_of(two, EXACT)) == pytest.approx(expected)
    host = replace(two, device=CPU)
    expected = 3 * FORWARD / 2e9 / 0.5 + 2 * 0.25 + reduced
    assert timing.pass_seconds(host, EXACT, workload_of(host, EXACT)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        # Half of 1,448 fp32 gradients go to the other rank: reduced and gathered; reduced; after both micro-batches.
        (0, 2 * 4 * 1448 / 2),
        (1, 4 * 1448 / 2),
        (2, 2 * 4 * 1448 / 2),
        # Half of the bf16 parameters come from it, twice for each micro-batch.
        (3, 2 * 4 * 1448 / 2 + 2 * 2 * 2 * 1448 / 2),
    ],
)
def test_ranks_send_each_other_gradients_and_at_stage_3_parameters(stage: int, sent: float) -> None:
    inputs = small(zero_stage=stage)
    load = workload_of(inputs, EXACT)
    assert timing.pass_seconds(inputs, EXACT, load) == pytest.approx(3 * FORWARD / 4e9 / 0.5 + 2 * 0.25 + sent / 1e8)


def test_bytes_of_the_optimizer_and_of_the_look_ahead() -> None:
    inputs = small(zero_stage=3)
    # AdamW: reads θ, g, m, v and writes θ, m, v; norms and clipping read and write g and read all four once more.
    assert timing.optimizer_seconds(inputs) == pytest.approx(4 * 724 * (7 + 7) / 1e9)
    # θ⁰ and g⁰: copied (4), read with θ and g¹, and θ written (5).
    assert timing.look_ahead_seconds(inputs, GxpoRule()) == pytest.approx(4 * 724 * 9 / 1e9)
    assert timing.look_ahead_seconds(inputs, GxpoRule(predictor="replay", probes=1)) == pytest.approx(4 * 724 * 6 / 1e9)


def test_sampling_lasts_as_long_as_its_longest_response() -> None:
    # 8 sequences of 20 of at most 40 tokens: 40 decoding steps with 4 sequences on average.
    inputs = small(kv_bytes=10**6)
    load = workload_of(inputs, EXACT)
    read = 2 * 1448 + 4 * (10 + 10) * 32
    computed = 4 * (2 * 1184 + 512 + 4 * 2 * 8 * 20)
    step = 0.125 + max(read / 0.5e9, computed / 1e9)
    prompts = 2 * 10 * (2 * 1184 + 4 * 2 * 8 * 5) / 1e9
    assert timing.sampling_seconds(inputs, EXACT, load) == pytest.approx(40 * step + prompts)


def test_a_small_cache_takes_more_decoding_steps() -> None:
    # A cache of 45 tokens holds two sequences of 22.5: 160 tokens take 80 steps.
    inputs = small(kv_bytes=45 * 32)
    load = workload_of(inputs, EXACT)
    assert timing.sampling_seconds(inputs, EXACT, load) == pytest.approx(80 * 0.125, rel=1e-2)


def test_samplers_share_the_sequences_on_gpus_and_the_cores_of_a_host() -> None:
    long = replace(EXACT, decode_step_s=0.0)
    cache = {"kv_bytes": 10**6, "prompts": 64, "max_num_seqs": 8}
    load = workload_of(small(**cache), long)
    one, two = (timing.sampling_seconds(small(**cache, samplers=count), long, load) for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)
    one, two = (timing.sampling_seconds(small(**cache, samplers=count, device=CPU), long, load) for count in (1, 2))
    assert two == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 2 * 1448 / 1e8),  # nccl between separate GPUs
        ({"weight_transport": "object_store"}, 2 * 2 * 1448 / 1e7),
        ({"learner_ranks": 1, "colocate": True}, 2 * 2 * 1448 / 1e9),  # cuda_ipc on shared ones
        ({"device": CPU}, 2 * 2 * 1448 / 1e7),
    ],
)
def test_a_sync_takes_what_its_transport_moves(changes: dict[str, Any], seconds: float) -> None:
    assert timing.sync_seconds(small(**changes)) == pytest.approx(seconds)


def test_sampling_ahead_hides_the_shorter_of_sampling_and_update_on_devices_of_their_own() -> None:
    inputs = small(rule=GxpoRule())
    load = workload_of(inputs, EXACT)

    def time(**changes: Any) -> timing.PlannedSeconds:
        return timing.step_time(replace(inputs, **changes), EXACT, load, inputs.rule)

    strict, ahead = time(), time(async_depth=1)
    assert strict.overlapped == 0.0
    shorter, longer = sorted((strict.sampling + strict.verify, strict.passes + strict.look_ahead))
    assert ahead.overlapped == shorter
    assert ahead.step == pytest.approx(longer + strict.sync + strict.other)
    assert time(async_depth=1, device=CPU).overlapped == 0.0


def test_a_reference_adds_a_forward_pass_a_step_and_a_rule_its_passes() -> None:
    inputs = small(zero_stage=0, learner_ranks=1)
    load = workload_of(inputs, EXACT)
    plain, with_kl = (
        timing.step_time(replace(inputs, reference=kind), EXACT, load, inputs.rule).passes  # type: ignore[arg-type]
        for kind in ("none", "whole")
    )
    assert with_kl - plain == pytest.approx(FORWARD / 2e9 / 0.5)
    assert timing.step_time(inputs, EXACT, load, GxpoRule()).passes == pytest.approx(3 * plain)
