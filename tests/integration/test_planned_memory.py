"""The planner's table of ZeRO stages against the tensors that DeepSpeed and the rules really hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
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
    bucket = 4 * inputs.trainable if inputs.zero_stage == 3 else 0
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
