"""A shape and inputs small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gxpo_trainer.config import BudgetConfig, GrpoRule, RunConfig
from gxpo_trainer.planner.devices import Assumptions, Device
from gxpo_trainer.planner.inputs import Inputs, ModelShape

SHAPE = ModelShape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocabulary=32, tied=True)
"""Attention 8·(2·8 + 2·4) = 192, MLP 3·8·16 = 384, norms 16: 592 a layer. 2·592 + 32·8 + 8 = 1,448 in all."""

GPU = Device("test", 0, bf16_flops=2e9, fp32_flops=1e9, memory_bandwidth=1e9)
"""On a device of unknown memory everything fits."""
CPU = replace(GPU, name="cpu")

EXACT = Assumptions(
    utilization=0.5,
    micro_batch_s=0.25,
    sampling_efficiency=0.5,
    decode_step_s=0.125,
    token_s=0.0,
    fixed_s=0.0,
    runtime_bytes=0,
    engine_bytes=0,
    prompt_fraction=0.5,
    response_fraction=0.5,
)
"""Nothing in addition to what is counted; half of every limit."""


SETTINGS = {
    **dict.fromkeys(("learner_ranks", "samplers", "tensor_parallel", "colocate", "strategy"), "placement"),
    **dict.fromkeys(("zero_stage", "precision", "lora", "packing", "token_budget", "mini_batches", "rule"), "learner"),
    "sequence_parallel": "learner",
    **dict.fromkeys(("optimizer", "loss"), "learner"),
    **dict.fromkeys(("gradient_checkpointing", "max_length"), "model"),
    **dict.fromkeys(("prompts_per_step", "samples_per_prompt", "max_new_tokens", "max_num_seqs"), "rollout"),
    **dict.fromkeys(("gpu_memory_utilization", "cpu_kv_cache_gib", "enforce_eager", "async_depth"), "rollout"),
    "max_prompt_tokens": "data",
}
"""The section of each setting that a test changes."""


def changed(inputs: Inputs, **changes: Any) -> Inputs:
    """Inputs with other values of some fields, settings or, as `budget` and `environment`, whole sections. Values are
    not checked: a KV cache may have less than a GiB."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name in SETTINGS:
            sections.setdefault(SETTINGS[name], {})[name] = value
    whole = {name: value for name, value in changes.items() if name in ("budget", "environment")}
    fields = {name: value for name, value in changes.items() if name not in SETTINGS and name not in whole}
    config = inputs.config.model_copy(update=whole).updated(**sections)
    return replace(inputs, config=config, **fields)


def small(**changes: Any) -> Inputs:
    """2 prompts × 4 responses of 10 and 20 tokens on two GPU ranks in bf16, GRPO, stage 2, one sampler."""
    base = changed(
        Inputs(RunConfig(), SHAPE, GPU, num_devices=3),
        learner_ranks=2,
        samplers=1,
        colocate=False,
        zero_stage=2,
        precision="bf16",
        gradient_checkpointing=False,
        token_budget=64,
        packing="padded",
        prompts_per_step=2,
        samples_per_prompt=4,
        max_prompt_tokens=20,
        max_new_tokens=40,
        max_length=60,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        max_num_seqs=512,
        rule=GrpoRule(),
        budget=BudgetConfig(steps=10),
    )
    # The sampler computes in bf16 whatever the learner does.
    base = base.updated(rollout={"dtype": "bfloat16"})
    return changed(base, **changes)
