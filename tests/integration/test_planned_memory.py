"""The planner's table of ZeRO stages against the tensors that DeepSpeed and the rules really hold."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.config import RunConfig
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"world_size": WORLD, "port": port, "cases": CASES}))
    worker = Path(__file__).with_name("planned_memory_worker.py")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(worker), str(job), str(rank)], env=environment) for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=500) for rank in ranks] == [0] * WORLD
    found = json.loads(job.with_suffix(".out").read_text())
    wrong = {
        json.dumps(case): (planned, held)
        for case, held in zip(CASES, found, strict=True)
        if abs((planned := planned_bytes(case)) / held - 1) > 0.04
    }
    assert not wrong
