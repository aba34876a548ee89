"""Memory of real ranks: the planner's table of ZeRO stages against the tensors that DeepSpeed and the rules hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import qwen2
from test_learner_stages import run_ranks

from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.planner import inputs_of
from gxpo_trainer.planner.devices import assumptions_for, device_named
from gxpo_trainer.planner.inputs import read_shape, workload_of
from gxpo_trainer.planner.memory import learner_parts

pytestmark = [pytest.mark.engine, pytest.mark.long("a matrix of stages, dtypes and rules")]

WORLD = 2
GXPO, SFPO, GRPO = {"name": "gxpo"}, {"name": "sfpo"}, {"name": "grpo"}
CASES: list[dict[str, Any]] = [
    {"zero_stage": 0, "precision": "fp32", "rule": GXPO},
    {"zero_stage": 0, "precision": "fp32", "rule": {**GXPO, "probe_state": "rollback"}},
    {"zero_stage": 0, "precision": "fp32", "rule": GRPO, "optimizer": {"name": "sgd", "momentum": 0.9}},
    {"zero_stage": 0, "precision": "fp32", "rule": GRPO, "loss": {"kl_beta": 0.1}},
    {"zero_stage": 1, "precision": "bf16", "rule": GXPO},
    {"zero_stage": 2, "precision": "fp32", "rule": SFPO},
    {"zero_stage": 2, "precision": "bf16", "rule": GXPO},
    {"zero_stage": 2, "precision": "bf16", "rule": GXPO, "lora": {"rank": 8}},
    {"zero_stage": 3, "precision": "fp32", "rule": GRPO},
    {"zero_stage": 3, "precision": "bf16", "rule": GXPO},
]
"""Stage 1 in fp32 is left out: its whole gradient is gone when the step ends."""
HELD = ("weights", "fp32 masters", "gradients", "optimizer", "rule buffers", "reference")


def planned_bytes(settings: dict[str, Any]) -> int:
    """What a plan says of the parts that outlive a step; at stage 3 with the reduction bucket, which does too."""
    config = RunConfig.model_validate({"learner": settings, "placement": {"learner_ranks": WORLD, "device": "cpu"}})
    device = device_named("cpu")
    inputs = inputs_of(config, read_shape("starter"), device)
    assumed = assumptions_for(device)
    parts = dict(learner_parts(inputs, assumed, workload_of(inputs, assumed)))
    bucket = 4 * inputs.trainable if config.learner.zero_stage == 3 else 0
    return int(sum(parts.get(name, 0) for name in HELD) / assumed.memory_factor) + bucket


def test_a_plan_counts_the_tensors_that_a_rank_holds(tmp_path: Path) -> None:
    cases = {f"case-{n}": ("held_bytes", {"loss": {}, "optimizer": {}, **case}) for n, case in enumerate(CASES)}
    run_ranks(WORLD, str(STARTER_FOLDER), tmp_path, cases)
    wrong = {}
    for name, case in zip(cases, CASES, strict=True):
        planned, held = planned_bytes(case), torch.load(tmp_path / f"{name}.pt", weights_only=True)["bytes"]
        if abs(planned / held - 1) > 0.04:
            wrong[json.dumps(case)] = planned, held
    assert not wrong


LOADS = [(dtype, stage) for dtype in ("bf16", "fp32") for stage in (0, 3)]
"""dtype of the files, ZeRO stage. The learner computes in fp32, so pages of bf16 files cannot serve as the weights."""


def test_loading_a_policy_takes_no_more_than_a_rank_keeps(tmp_path: Path) -> None:
    """In units of the policy's fp32 bytes, on each of two ranks."""
    model = qwen2(4096, 512, 1536, 8, 8, 8)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path / "fp32")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    cases = {
        f"{dtype}-{stage}": ("load_memory", {"folder": str(tmp_path / dtype), "zero_stage": stage})
        for dtype, stage in LOADS
    }
    # Freed tensors go back to the system at once, so that the resident set shows what is alive.
    run_ranks(WORLD, str(tmp_path / "fp32"), tmp_path, cases, MALLOC_MMAP_THRESHOLD_="65536")
    for name in cases:
        for rank in torch.load(tmp_path / f"{name}.pt", weights_only=True)["ranks"]:
            peak, held = rank["peak"] / size, rank["held"] / size
            if name.endswith("-3"):
                # Its half, and the largest tensor, the embedding with 7% of the parameters, while it is read and cut.
                assert peak < 0.75
                assert 0.49 < held < 0.55
            elif name == "bf16-0":
                assert 0.95 < held <= peak < 1.05, "converted without a second copy"
            else:
                assert peak < 0.05, "pages of the files"
