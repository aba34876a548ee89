"""Memory of a learner rank and of a sampler, counted by hand on a model of 1,448 parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.small_plan import CPU, EXACT, GPU, SHAPE, changed, small
from support.toy_learner import ToyLearner, quadratic

from gxpo_trainer.config import (
    EnvironmentConfig,
    GrpoRule,
    GxpoRule,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    RuleSettings,
    SfpoRule,
)
from gxpo_trainer.config.engines import logits_chunk
from gxpo_trainer.planner import timing
from gxpo_trainer.planner.devices import device_named
from gxpo_trainer.planner.inputs import peak_tokens, workload_of
from gxpo_trainer.planner.memory import activation_bytes, batched_tokens, learner_parts, mask_bytes, sampler_memory
from gxpo_trainer.planner.timing import forward_flops
from gxpo_trainer.rules.contract import make_rule

GIB = 2**30


def parts(**changes: Any) -> dict[str, int]:
    inputs = small(**changes)
    return dict(learner_parts(inputs, EXACT, workload_of(inputs, EXACT)))


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [
        # Two ranks of 1,448 parameters; a shard has 724.
        (0, "fp32", {"weights": 5792, "gradients": 5792, "optimizer": 11584}),
        (1, "fp32", {"weights": 5792, "fp32 masters": 2896, "gradients": 5792 + 2896, "optimizer": 5792}),
        (2, "fp32", {"weights": 5792, "fp32 masters": 2896, "gradients": 2896, "optimizer": 5792}),
        (3, "fp32", {"weights": 2896, "fp32 masters": 2896, "gradients": 2896, "optimizer": 5792}),
        (1, "bf16", {"weights": 2896, "fp32 masters": 2896, "gradients": 5792 + 2896, "optimizer": 5792}),
        (2, "bf16", {"weights": 2896, "fp32 masters": 2896, "gradients": 2896, "optimizer": 5792}),
        (3, "bf16", {"weights": 1448, "fp32 masters": 2896, "gradients": 2896, "optimizer": 5792}),
    ],
)
def test_shards_of_each_zero_stage(stage: int, precision: str, expected: dict[str, int]) -> None:
    counted = parts(zero_stage=stage, precision=precision)
    names = ("weights", "fp32 masters", "gradients", "optimizer")
    assert {name: counted[name] for name in names if name in counted} == expected


def test_reduction_buckets_and_gathered_parameters() -> None:
    assert parts(zero_stage=0, precision="fp32")["communication"] == 4 * 1448
    assert "communication" not in parts(zero_stage=0, precision="fp32", learner_ranks=1)
    # Two buckets of 1,448 fp32 elements on a GPU, one on a CPU; at stage 3 all 1,448 bf16 parameters are gathered.
    assert parts(zero_stage=2)["communication"] == 2 * 4 * 1448
    assert parts(zero_stage=3)["communication"] == 2 * 4 * 1448 + 2 * 1448
    assert parts(zero_stage=2, device=CPU)["communication"] == 4 * 1448


@pytest.mark.parametrize(
    ("rule", "optimizer", "buffers"),
    [
        (GrpoRule(), "adamw", 0),
        (SfpoRule(k=3), "adamw", 1),
        (GxpoRule(), "adamw", 2),
        (GxpoRule(predictor="displacement"), "adamw", 2),
        (GxpoRule(predictor="replay", probes=1), "adamw", 1),
        (GxpoRule(probe_state="rollback"), "adamw", 4),
        (GxpoRule(probe_state="rollback"), "sgd", 2),
    ],
)
def test_each_rules_buffers_are_those_that_it_holds(rule: RuleSettings, optimizer: str, buffers: int) -> None:
    moments = 2 if optimizer == "adamw" else 0
    assert rule.shard_buffers(moments) == buffers
    assert parts(rule=rule, optimizer=OptimizerConfig(name=optimizer)).get("rule buffers", 0) == buffers * 4 * 724
    import torch

    toy = ToyLearner(torch.ones(3), quadratic(torch.tensor([0.1, 0.5, 0.9])), optimizer=optimizer, lr=0.01)
    subject: Any = make_rule(rule)
    subject.step(toy)
    held = getattr(subject, "buffers", None)
    assert (held.count() if held else int(getattr(subject, "_theta0", None) is not None)) == buffers


@pytest.mark.parametrize(
    ("rule", "optimizer", "copies"), [(SfpoRule(), "adamw", 3), (GxpoRule(), "sgd", 1), (GrpoRule(), "adamw", 0)]
)
def test_a_trajectory_copies_parameters_and_moments_of_a_rule_that_looks_ahead(
    rule: RuleSettings, optimizer: str, copies: int
) -> None:
    inputs = small(rule=rule, optimizer=OptimizerConfig(name=optimizer))
    for every in (0, 10):
        diagnosed = inputs.updated(diagnostics={"trajectory_every": every})
        counted = learner_parts(diagnosed, EXACT, workload_of(diagnosed, EXACT))
        assert counted.get("diagnostics", 0) == (copies * 4 * 724 if every else 0)


def test_a_reference_is_partitioned_at_stage_3_and_else_on_a_gpu_only_during_its_pass() -> None:
    kl = LossConfig(kl_beta=0.1)
    assert parts(loss=kl, zero_stage=3)["reference"] == 2 * 724
    # On a GPU 2·1448 bytes come in place of the activations: 736 a token, of the widest row, 30 tokens.
    assert "reference" not in parts(loss=kl)
    assert parts(loss=kl, device=CPU)["reference"] == 2 * 1448
    assert "reference" not in parts(loss=kl, device=CPU, lora=LoraConfig())
    for lora in (None, LoraConfig()):
        assert parts(zero_stage=3, teacher_parameters=2000, lora=lora)["reference"] == 2 * 1000
    # What exceeds the activations is planned for: with 100,000 words the weights do.
    inputs = small(loss=kl, shape=replace(SHAPE, vocabulary=100_000))
    load = workload_of(inputs, EXACT)
    excess = 2 * (1448 + 8 * (100_000 - 32)) - activation_bytes(inputs, peak_tokens(inputs, load))
    assert learner_parts(inputs, EXACT, load)["reference"] == excess > 1_500_000


def test_lora_shards_are_those_of_the_adapter() -> None:
    # Rank 3 on q (8 → 8) and v (8 → 4) of two layers: 3·(16 + 12)·2 = 168 parameters.
    count = SHAPE.adapter_parameters(3, ("q_proj", "v_proj"))
    assert count == 168
    counted = parts(lora=LoraConfig(rank=3, target_modules=("q_proj", "v_proj")), rule=GxpoRule())
    assert counted["weights"] == 2 * (1448 + 168)
    assert counted["logits"] == 12 * 60 * 32, "the head has no gradient"
    assert (counted["fp32 masters"], counted["optimizer"], counted["rule buffers"]) == (4 * 84, 8 * 84, 8 * 84)


def test_activations_of_a_token() -> None:
    # A layer in fp32: norms 2·8·12 = 192, attention 4·(2·8 + 2·4) = 96, MLP 4·4·16 = 256; 544. Two layers and the
    # gradients of one, 4·(2·8 + 3·16) = 256.
    fp32 = small(precision="fp32")
    assert activation_bytes(fp32, 1) == 2 * 544 + 256
    # In bf16: norms 2·8·8 = 128, attention 48, MLP 128; gradients 128.
    assert activation_bytes(small(), 1) == 2 * (128 + 48 + 128) + 128
    # Checkpointing keeps the 8 inputs of each layer and one layer.
    assert activation_bytes(changed(fp32, gradient_checkpointing=True), 10) == 10 * (2 * 8 * 4 + 544 + 256)


@pytest.mark.parametrize(
    ("budget", "tokens", "shared", "micro_batches"), [(64, 60, 30, 4), (100, 90, 45, 3), (4096, 120, 120, 1)]
)
def test_a_micro_batch_holds_the_budget_or_the_longest_sequence_or_all_there_is(
    budget: int, tokens: int, shared: int, micro_batches: int
) -> None:
    # Rows of 30 tokens: two in 64. A sequence may have 60. A rank has 4 rows, 120 tokens.
    inputs = small(token_budget=budget)
    assert peak_tokens(inputs, workload_of(inputs, EXACT)) == tokens
    # The two ranks together have all 8 rows, 240 tokens, and each has half of the columns.
    parallel = changed(inputs, sequence_parallel=2)
    load = workload_of(parallel, EXACT)
    assert (peak_tokens(parallel, load), load.micro_batches) == (shared, micro_batches)


def test_observations_lengthen_rows_and_contexts_but_are_not_decoded() -> None:
    """Half of 16 observation tokens are 8: rows of 10 + 28 tokens, of which 20 are sampled."""
    observed = EnvironmentConfig(name="calculator", max_turns=2, max_observation_tokens=16)
    plain, inputs = small(token_budget=4096), small(token_budget=4096, environment=observed, max_length=100)
    load = workload_of(inputs, EXACT)
    assert (load.response, load.observation, load.row_width) == (20.0, 8.0, 38.0)
    assert load.learner_tokens == 8 * 38
    assert load.context == 10 + 28 / 2
    assert peak_tokens(inputs, load) == 152  # all 4 rows of a rank
    # The longest sequence: 20 + 40 + 16, but at most model.max_length = 60.
    assert peak_tokens(changed(inputs, token_budget=38), load) == 76
    assert peak_tokens(changed(inputs, token_budget=38, max_length=60), load) == 60
    # The head runs for sampled tokens alone: only the backbone's work grows.
    before = workload_of(plain, EXACT)
    backbone = 8 * 8 * SHAPE.backbone_flops
    attention = 8 * (38 * SHAPE.attention_flops(19) - 30 * SHAPE.attention_flops(15))
    assert forward_flops(inputs, load) - forward_flops(plain, before) == pytest.approx(backbone + attention)


def test_shared_prompts_have_a_mask_in_every_layer() -> None:
    inputs = small(packing="shared", device=CPU, precision="fp32", learner_ranks=1, token_budget=4096, zero_stage=0)
    load = workload_of(inputs, EXACT)
    # Both prompts of 10 once, 8 responses of 20: two rows of 90 tokens.
    assert (load.responses_per_row, load.row_width, load.learner_tokens) == (4, 90.0, 180.0)
    assert mask_bytes(inputs, load) == 180 * 90 * (1 + 2 * 4)


def test_logits_are_counted_by_chunk() -> None:
    # 60 tokens × 32 words, three fp32 copies, and the head's gradient: one product for one chunk, else a sum in fp32,
    # in bf16 beside the product that is added.
    assert parts()["logits"] == 12 * 60 * 32 + 2 * 256
    wide = replace(SHAPE, vocabulary=2**25)
    for precision, gradient in (("bf16", 6), ("fp32", 4)):
        counted = parts(shape=wide, precision=precision)
        assert counted["logits"] == 12 * 2**25 + gradient * 8 * 2**25


@pytest.mark.parametrize(
    ("device", "chunk", "tokens"),
    [("cpu", 25, 8192), ("l4-24", 26, 8192), ("a100-40", 27, 8192), ("a100-80", 28, 8192), ("h100-80", 28, 16384)],
)
def test_chunks_and_batches_follow_the_devices_memory(device: str, chunk: int, tokens: int) -> None:
    """At most 1/24 of the memory for three fp32 copies; vLLM's defaults: 16,384 tokens from 70 GiB on except A100."""
    known = device_named(device)
    assert logits_chunk(known.memory_bytes if known.kind == "gpu" else 0) == 2**chunk
    assert batched_tokens(known) == tokens


def test_a_gpu_holds_two_buckets_of_what_is_sent_and_a_host_two_published_versions_on_rank_0() -> None:
    assert parts()["published weights"] == 2 * 2 * 1448
    large = replace(SHAPE, layers=2_000_000)
    assert parts(shape=large)["published weights"] == 2 * 512 * 2**20
    # Rank 1 on q and o (8 → 8), k and v (8 → 4) of two layers.
    assert parts(lora=LoraConfig(rank=1))["published weights"] == 2 * 2 * 2 * (2 * 16 + 2 * 12)
    host = small(device=CPU)
    load = workload_of(host, EXACT)
    assert learner_parts(host, EXACT, load)["published weights"] == 2 * 2 * 1448
    assert "published weights" not in learner_parts(host, EXACT, load, publishes=False)


def test_the_kv_cache_is_what_the_sampler_leaves_and_holds_sequences_of_mean_length() -> None:
    # A token takes 2 layers × (key + value) × 4 × 2 bytes = 32. A sequence has 20 tokens and a quarter of 10 others.
    inputs = small(device=replace(GPU, memory_bytes=GIB))
    memory = sampler_memory(inputs, workload_of(inputs, EXACT))
    assert memory.weights == 2 * 1448
    assert memory.kv == GIB // 2 - memory.weights - memory.working
    assert memory.sequences == int(memory.kv // 32 / 22.5)
    for tokens in (59, 60):
        fixed = small(device=CPU, cpu_kv_cache_gib=32 * tokens / GIB)
        assert sampler_memory(fixed, workload_of(inputs, EXACT)).longest_fits == (tokens == 60)


def test_tensor_parallel_splits_weights_and_as_many_heads_as_there_are() -> None:
    load = workload_of(small(), EXACT)
    cache = {"device": CPU, "cpu_kv_cache_gib": 2250 * 32 / GIB}
    whole, halves = (sampler_memory(small(**cache, tensor_parallel=count), load) for count in (1, 2))
    assert halves.weights == 1448
    # One KV head cannot be split: both devices hold it.
    assert (whole.sequences, halves.sequences) == (100, 100)
    two = replace(SHAPE, kv_heads=2)
    assert sampler_memory(small(shape=two, **cache, tensor_parallel=2), load).sequences == 100
    assert sampler_memory(small(shape=two, **cache), load).sequences == 50


@pytest.mark.parametrize(("precision", "kv_heads"), [("fp32", 4), ("bf16", 4), ("bf16", 2)])
def test_counted_activations_are_what_torch_saves(precision: str, kv_heads: int) -> None:
    import torch
    from support.tiny_policy import qwen2

    model = qwen2(512, 128, 384, 4, 4, kv_heads).to(torch.float32 if precision == "fp32" else torch.bfloat16).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.randint(0, 512, (8, 64)), use_cache=False).last_hidden_state
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert hidden.shape == (8, 64, 128)
    sizes = {"hidden": 128, "intermediate": 384, "layers": 4, "heads": 4, "head_dim": 32, "vocabulary": 512}
    inputs = small(shape=replace(SHAPE, **sizes, kv_heads=kv_heads), precision=precision)
    item = inputs.item
    working = 512 * item * (2 * 128 + 3 * 384)
    assert activation_bytes(inputs, 512) - working == pytest.approx(saved, rel=0.05)


# Seconds of a step by hand, on devices of 1 and 2 GFLOP/s.


FORWARD = 240 * (2 * 1184 + 4 * 2 * 8 * 15) + 160 * 2 * 256
"""8 rows of 30 tokens through 2 · 592 parameters, attending to 15 on average; logits of 160 response tokens."""


@pytest.mark.parametrize(
    ("changes", "flops", "speed", "micro_batches"),
    [
        # 8 rows, two in a micro-batch.
        ({"learner_ranks": 1}, 3 * FORWARD, 2e9, 4),
        ({"learner_ranks": 1, "gradient_checkpointing": True}, 4 * FORWARD, 2e9, 4),
        ({"learner_ranks": 1, "lora": LoraConfig(rank=4)}, 2 * FORWARD, 2e9, 4),
        # Two ranks share a pass on GPUs, and a host is one device.
        ({}, 3 * FORWARD, 4e9, 2),
        ({"device": CPU}, 3 * FORWARD, 2e9, 2),
    ],
)
def test_flops_and_seconds_of_a_pass(changes: dict[str, Any], flops: float, speed: float, micro_batches: int) -> None:
    inputs = small(zero_stage=0, **changes)
    load = workload_of(inputs, EXACT)
    assert timing.forward_flops(inputs, load) == FORWARD
    assert load.micro_batches == micro_batches
    assert timing.pass_seconds(inputs, EXACT, load) == pytest.approx(flops / speed / 0.5 + micro_batches * 0.25)


def test_bytes_of_the_optimizer_and_of_the_look_ahead() -> None:
    inputs = small(zero_stage=3)
    load = workload_of(inputs, EXACT)

    def time(rule: RuleSettings) -> timing.PlannedSeconds:
        return timing.step_time(inputs, EXACT, load, rule)

    # AdamW: reads θ, g, m, v and writes θ, m, v; norms and clipping read and write g and read all four once more.
    optimizer = 4 * 724 * (7 + 7) / 1e9
    assert time(GrpoRule()).passes == pytest.approx(timing.pass_seconds(inputs, EXACT, load) + optimizer, rel=1e-12)
    # θ⁰ and g⁰: copied (4), read with θ and g¹, and θ written (5).
    assert time(GxpoRule()).look_ahead == pytest.approx(4 * 724 * 9 / 1e9)
    assert time(GxpoRule(predictor="replay", probes=1)).look_ahead == pytest.approx(4 * 724 * 6 / 1e9)
    assert time(GrpoRule()).look_ahead == 0


def test_sampling_lasts_as_long_as_its_longest_response() -> None:
    # 8 sequences of 20 of at most 40 tokens: 40 decoding steps with 4 sequences on average.
    inputs = small(device=CPU)
    load = workload_of(inputs, EXACT)
    read = 2 * 1448 + 4 * (10 + 10) * 32
    computed = 4 * (2 * 1184 + 512 + 4 * 2 * 8 * 20)
    step = 0.125 + max(read / 0.5e9, computed / 1e9)
    prompts = 2 * 10 * (2 * 1184 + 4 * 2 * 8 * 5) / 1e9
    assert timing.sampling_seconds(inputs, EXACT, load) == pytest.approx(40 * step + prompts)
    # A cache of 45 tokens holds two sequences of 22.5: 160 tokens take 80 steps.
    little = changed(inputs, cpu_kv_cache_gib=45 * 32 / GIB)
    assert timing.sampling_seconds(little, EXACT, load) == pytest.approx(80 * 0.125, rel=1e-2)


def test_samplers_share_the_sequences_on_gpus_and_the_cores_of_a_host() -> None:
    long = replace(EXACT, decode_step_s=0.0)
    for device, share in ((replace(GPU, memory_bytes=GIB), 0.5), (CPU, 1)):
        run = {"device": device, "prompts_per_step": 64, "max_num_seqs": 8}
        load = workload_of(small(**run), long)
        one, two = (timing.sampling_seconds(small(**run, samplers=count), long, load) for count in (1, 2))
        assert two == pytest.approx(one * share, rel=0.05)


def test_sampling_ahead_hides_the_shorter_of_sampling_and_update_on_devices_of_their_own() -> None:
    inputs = small(rule=GxpoRule())
    load = workload_of(inputs, EXACT)

    def time(**changes: Any) -> timing.PlannedSeconds:
        return timing.step_time(changed(inputs, **changes), EXACT, load, inputs.config.learner.rule)

    strict, ahead = time(), time(async_depth=1)
    assert strict.overlapped == 0.0
    shorter, longer = sorted((strict.sampling, strict.passes + strict.look_ahead))
    assert ahead.overlapped == shorter
    assert ahead.step == pytest.approx(longer + strict.other)
    assert time(async_depth=1, device=CPU).overlapped == 0.0


def test_a_reference_adds_a_forward_pass_a_step_and_a_rule_its_passes() -> None:
    inputs = small(zero_stage=0, learner_ranks=1)
    load = workload_of(inputs, EXACT)
    plain, with_kl = (
        timing.step_time(changed(inputs, loss=LossConfig(kl_beta=beta)), EXACT, load, GrpoRule()).passes
        for beta in (0.0, 0.1)
    )
    assert with_kl - plain == pytest.approx(FORWARD / 2e9 / 0.5)
    assert timing.step_time(inputs, EXACT, load, GxpoRule()).passes == pytest.approx(3 * plain)
    halves = changed(inputs, mini_batches=2)
    assert timing.step_time(halves, EXACT, load, GrpoRule()).passes == pytest.approx(with_kl)
    ahead = halves.config.updated(rollout={"async_depth": 1})
    for loss, passes in ((LossConfig(), with_kl), (LossConfig(proximal="sampler"), plain)):
        stale = changed(replace(halves, config=ahead), loss=loss)
        assert timing.step_time(stale, EXACT, load, GrpoRule()).passes == pytest.approx(passes)
    # Worked answers have no log π_old.
    worked, in_halves = (
        timing.step_time(
            replace(one, config=one.config.updated(rollout={"source": "dataset"})), EXACT, load, GrpoRule()
        )
        for one in (inputs, halves)
    )
    assert worked == in_halves
