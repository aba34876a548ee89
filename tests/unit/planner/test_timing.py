"""Seconds of a step by hand, on devices of 1 and 2 GFLOP/s; assumptions fitted to metrics made with other factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.small_plan import CPU, EXACT, GPU, SHAPE, small

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import make_plan
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs, workload_of
from gxpo_trainer.planner.memory import learner_parts
from gxpo_trainer.planner.timing import (
    StepTime,
    calibrate,
    fit_two,
    forward_flops,
    look_ahead_seconds,
    observe,
    optimizer_seconds,
    pass_flops,
    pass_seconds,
    reduce_seconds,
    sampling_seconds,
    step_time,
    sync_seconds,
)

FORWARD = 240 * (2 * 1184 + 4 * 2 * 8 * 15) + 160 * 2 * 256
"""8 rows of 30 tokens through 2 · 592 parameters, attending to 15 on average; logits of 160 response tokens."""


def test_flops_of_a_pass() -> None:
    inputs = small()
    load = workload_of(inputs, EXACT)
    assert forward_flops(inputs, load) == FORWARD
    assert pass_flops(inputs, load) == 3 * FORWARD
    assert pass_flops(replace(inputs, checkpointing=True), load) == 4 * FORWARD
    assert pass_flops(replace(inputs, adapter_rank=4), load) == 2 * FORWARD
    assert pass_flops(inputs, load, zero_variance=0.5) == 2 * FORWARD, "half of the groups run forward only"
    assert pass_flops(replace(inputs, reference="whole"), load, zero_variance=0.5) == 3 * FORWARD


def test_ranks_share_a_pass_on_gpus_and_a_host_is_one_device() -> None:
    inputs = small(zero_stage=0, precision="bf16", learner_ranks=1)
    load = workload_of(inputs, EXACT)
    # 8 rows, two in a micro-batch.
    assert load.micro_batches == 4
    assert pass_seconds(inputs, EXACT, load) == pytest.approx(3 * FORWARD / 2e9 / 0.5 + 4 * 0.25)
    two = replace(inputs, learner_ranks=2)
    reduced = 2 * 0.5 * 4 * 1448 / 1e8
    expected = 3 * FORWARD / 4e9 / 0.5 + 2 * 0.25 + reduced
    assert pass_seconds(two, EXACT, workload_of(two, EXACT)) == pytest.approx(expected)
    host = replace(two, device=CPU)
    expected = 3 * FORWARD / 2e9 / 0.5 + 2 * 0.25 + reduced
    assert pass_seconds(host, EXACT, workload_of(host, EXACT)) == pytest.approx(expected)


def test_stage_2_reduces_after_every_micro_batch() -> None:
    inputs = small(zero_stage=2)
    load = workload_of(inputs, EXACT)
    assert reduce_seconds(inputs, load) == pytest.approx(2 * 4 * 1448 / 2 / 1e8)


def test_stage_3_gathers_beside_computing() -> None:
    inputs = small(zero_stage=3)
    load = workload_of(inputs, EXACT)
    slow = replace(inputs, device=replace(GPU, link_bandwidth=1e3))
    # 1,448 bf16 parameters, half of them from the other rank, twice for each of two micro-batches; then gradients.
    expected = 2 * 2 * 1448 * 2 / 2 / 1e3 + 2 * 4 * 1448 / 2 / 1e3
    assert pass_seconds(slow, EXACT, load) == pytest.approx(expected)


def test_bytes_of_the_optimizer_and_of_the_look_ahead() -> None:
    inputs = small(zero_stage=3)
    # AdamW: reads θ, g, m, v and writes θ, m, v; norms and clipping read and write g and read all four once more.
    assert optimizer_seconds(inputs) == pytest.approx(4 * 724 * (7 + 7) / 1e9)
    # θ⁰ and g⁰: copied (4), read with θ and g¹, and θ written (5).
    assert look_ahead_seconds(inputs, GxpoRule()) == pytest.approx(4 * 724 * 9 / 1e9)
    assert look_ahead_seconds(inputs, GxpoRule(predictor="replay", probes=1)) == pytest.approx(4 * 724 * 6 / 1e9)


def test_sampling_lasts_as_long_as_its_longest_response() -> None:
    # 8 sequences of 20 of at most 40 tokens: 40 decoding steps with 4 sequences on average.
    inputs = small(kv_bytes=10**6)
    load = workload_of(inputs, EXACT)
    read = 2 * 1448 + 4 * (10 + 10) * 32
    computed = 4 * (2 * 1184 + 512 + 4 * 2 * 8 * 20)
    step = 0.125 + max(read / 0.5e9, computed / 1e9)
    prompts = 2 * 10 * (2 * 1184 + 4 * 2 * 8 * 5) / 1e9
    assert sampling_seconds(inputs, EXACT, load) == pytest.approx(40 * step + prompts)


def test_a_small_cache_takes_more_decoding_steps() -> None:
    # A cache of 45 tokens holds two sequences of 22.5: 160 tokens take 80 steps.
    inputs = small(kv_bytes=45 * 32)
    load = workload_of(inputs, EXACT)
    assert sampling_seconds(inputs, EXACT, load) == pytest.approx(80 * 0.125, rel=1e-2)


def test_samplers_share_the_sequences_on_gpus_and_the_cores_of_a_host() -> None:
    long = replace(EXACT, decode_step_s=0.0)
    cache = {"kv_bytes": 10**6, "prompts": 64, "max_num_seqs": 8}
    load = workload_of(small(**cache), long)
    one, two = (sampling_seconds(small(**cache, samplers=count), long, load) for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)
    one, two = (sampling_seconds(small(**cache, samplers=count, device=CPU), long, load) for count in (1, 2))
    assert two == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 2 * 1448 / 1e8),  # nccl between separate GPUs
        ({"weight_transport": "shared_memory"}, 2 * 2 * 1448 / 1e7),
        ({"weight_transport": "object_store"}, 3 * 2 * 1448 / 1e7),
        ({"weight_transport": "shared_memory", "tensor_parallel": 2}, 1.5 * 2 * 1448 / 1e7),
        ({"learner_ranks": 1, "colocate": True}, 2 * 2 * 1448 / 1e9),  # cuda_ipc on shared ones
        ({"device": CPU}, 2 * 2 * 1448 / 1e7),
        ({"zero_stage": 3}, 2 * 1448 / 1e8 + 2 * 1448 / 2 / 1e8),
    ],
)
def test_a_sync_takes_what_its_transport_moves(changes: dict[str, Any], seconds: float) -> None:
    assert sync_seconds(small(**changes)) == pytest.approx(seconds)


def test_a_closed_gate_takes_one_pass_and_no_look_ahead() -> None:
    inputs = small(rule=GxpoRule())
    load = workload_of(inputs, EXACT)
    opened, closed = (step_time(inputs, EXACT, load, inputs.rule, gate_open=state) for state in (True, False))
    assert opened.passes == pytest.approx(3 * closed.passes)
    assert closed.look_ahead == 0.0
    assert closed.sampling == opened.sampling


def test_sampling_ahead_hides_the_shorter_of_sampling_and_update_on_devices_of_their_own() -> None:
    inputs = small(rule=GxpoRule())
    load = workload_of(inputs, EXACT)

    def time(**changes: Any) -> StepTime:
        return step_time(replace(inputs, **changes), EXACT, load, inputs.rule, gate_open=True)

    strict, ahead = time(), time(async_depth=1)
    assert strict.overlapped == 0.0
    shorter, longer = sorted((strict.sampling + strict.verify, strict.update))
    assert ahead.overlapped == shorter
    assert ahead.total == pytest.approx(longer + strict.sync + strict.other)
    assert time(async_depth=1, device=CPU).overlapped == 0.0


def test_a_reference_adds_a_forward_pass_a_step() -> None:
    inputs = small(zero_stage=0, learner_ranks=1)
    load = workload_of(inputs, EXACT)
    plain, with_kl = (
        step_time(replace(inputs, reference=kind), EXACT, load, inputs.rule, gate_open=True).passes  # type: ignore[arg-type]
        for kind in ("none", "whole")
    )
    copied = 2 * 1448 / inputs.device.host_bandwidth
    assert with_kl - plain == pytest.approx(FORWARD / 2e9 / 0.5 + 4 * 0.25 / 3 + copied)
    assert SHAPE.parameters == 1448


TRUE = replace(
    EXACT,
    utilization=0.2,
    micro_batch_s=0.5,
    sampling_efficiency=0.25,
    decode_step_s=0.05,
    verify_s=0.125,
    sync_s=0.0625,
    step_s=0.03125,
    memory_factor=1.5,
    runtime_bytes=4000,
    engine_bytes=1000,
    prompt_fraction=0.25,
    response_fraction=0.75,
)
BASE = replace(EXACT, engine_bytes=500)


def measured(inputs: Inputs, assumed: Assumptions) -> Mapping[str, float]:
    load = workload_of(inputs, assumed)
    time = step_time(inputs, assumed, load, inputs.rule, gate_open=True)
    allocated = sum(learner_parts(inputs, assumed, load).values())
    return {
        "rollout/length_mean": load.response,
        "rollout/prompt_length_mean": load.prompt,
        "update/backward_passes": 3.0,
        "time/rollout_s": time.sampling,
        "time/verify_s": time.verify,
        "time/update_s": time.update,
        "time/sync_s": time.sync,
        "time/step_s": time.total,
        "system/learner_idle_bytes": float(assumed.runtime_bytes),
        "system/learner_peak_bytes": float(allocated),
    }


def runs_of(*sizes: int) -> list[Inputs]:
    runs = []
    for hidden in sizes:
        shape = replace(SHAPE, hidden=hidden, intermediate=2 * hidden, heads=hidden // 4)
        inputs = small(shape=shape, trainable=shape.parameters, device=CPU, rule=GxpoRule(), kv_bytes=10**9)
        runs.append(replace(inputs, learner_ranks=1))
    return runs


def test_runs_of_several_sizes_give_every_factor_back() -> None:
    runs = [
        observe(f"run {n}", inputs, [measured(inputs, TRUE)] * 5) for n, inputs in enumerate(runs_of(256, 512, 768))
    ]
    fitted = calibrate(BASE, runs)
    for name in ("utilization", "micro_batch_s", "sampling_efficiency", "decode_step_s", "memory_factor"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    for name in ("verify_s", "sync_s", "step_s", "prompt_fraction", "response_fraction"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert fitted.runtime_bytes == 4000
    assert fitted.source == "calibrated to run 0, run 1, run 2"


def test_a_plan_calibrated_to_one_run_gives_that_runs_times_and_memory() -> None:
    (inputs,) = runs_of(64)
    metrics = measured(inputs, TRUE)
    plan = make_plan(inputs, calibrate(BASE, [observe("a", inputs, [metrics])]))
    own = next(rule for rule in plan.rules if rule.own)
    assert own.time.total == pytest.approx(metrics["time/step_s"], rel=1e-6)
    assert own.time.sampling == pytest.approx(metrics["time/rollout_s"], rel=1e-6)
    learner = sum(learner_parts(inputs, plan.assumed, plan.load).values())
    assert learner == pytest.approx(metrics["system/learner_peak_bytes"], rel=1e-3)


def test_the_first_steps_are_left_out_where_there_are_others() -> None:
    (inputs,) = runs_of(64)
    usual = dict(measured(inputs, TRUE))
    slow = usual | {"time/update_s": 99.0}
    assert observe("a", inputs, [slow, slow, usual, usual]).metrics["time/update_s"] == usual["time/update_s"]
    assert observe("a", inputs, [slow, slow]).metrics["time/update_s"] == 99.0


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--calibrate a: no step has rollout/length_mean, .*name the folder of a run"
    ):
        observe("a", small(), [{"time/checkpoint_s": 1.0}])


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([(1.0, 1.0, 5.0), (1.0, 2.0, 7.0), (2.0, 1.0, 8.0)], (3.0, 2.0)),
        ([(2.0, 2.0, 8.0)], (2.0, 2.0)),  # one measurement: both terms alike
        ([(1.0, 1.0, 3.0), (2.0, 2.0, 6.0)], (1.5, 1.5)),  # no difference in shape: the same
        ([(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 4.0, 1.0)], (1.0, 0.0)),
        ([(1.0, 10.0, 4.0), (5.0, 10.0, 4.0), (10.0, 10.0, 3.9)], (0.0, 0.39655)),  # never below 0
    ],
)
def test_two_terms_are_fitted_to_relative_errors(
    terms: list[tuple[float, float, float]], expected: tuple[float, float]
) -> None:
    assert fit_two(terms) == pytest.approx(expected, abs=1e-4)
