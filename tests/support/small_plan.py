"""A shape and inputs small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gxpo_trainer.config import BudgetConfig, GrpoRule
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


def small(**changes: Any) -> Inputs:
    """2 prompts × 4 responses of 10 and 20 tokens on two GPU ranks in bf16, GRPO, stage 2, one sampler."""
    inputs = Inputs(
        shape=SHAPE,
        device=GPU,
        num_devices=3,
        learner_ranks=2,
        samplers=1,
        tensor_parallel=1,
        colocate=False,
        one_node=True,
        zero_stage=2,
        precision="bf16",
        adapter_rank=None,
        trainable=SHAPE.parameters,
        num_moments=2,
        reference="none",
        checkpointing=False,
        token_budget=64,
        rows="padded",
        mini_batches=1,
        prompts=2,
        group=4,
        prompt_limit=20,
        response_limit=40,
        full_responses=False,
        max_length=60,
        sampler_item=2,
        memory_utilization=0.5,
        eager=True,
        kv_bytes=None,
        max_num_seqs=512,
        async_depth=0,
        rule=GrpoRule(),
        budget=BudgetConfig(steps=10),
    )
    return replace(inputs, **changes)
