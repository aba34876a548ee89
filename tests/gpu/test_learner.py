"""The DeepSpeed learner in bf16 on one CUDA device, at every ZeRO stage that it supports there."""

from __future__ import annotations

import math
import socket
from typing import Any

import numpy as np
import pytest
import torch

from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, with_scale
from gxpo_trainer.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
RULES: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "sfpo", "k": 3},
    {"name": "gxpo", "k": 5, "gate": {"mode": "never"}},
]


def batch() -> StepBatch:
    rng = np.random.default_rng(0)
    sequences = [
        ScoredSequence(
            rng.integers(3, 60, 12).astype(np.int32),
            rng.integers(3, 60, length).astype(np.int32),
            advantage,
            np.full(length, -3.0, np.float32),
        )
        for length, advantage in zip((9, 17, 30, 24), (1.0, -1.0, 0.5, -0.5), strict=True)
    ]
    return with_scale(sequences, 32)


def learner(stage: int, rule: dict[str, Any], **settings: Any) -> Any:
    from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = RunConfig.model_validate(
        {"learner": {"precision": "bf16", "zero_stage": stage, "rule": rule, **settings}, "model": {"max_length": 256}}
    )
    return DeepSpeedLearner(config, master_port=port, device="gpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_five_steps_in_bf16_are_finite_and_move_the_weights(stage: int, rule: dict[str, Any]) -> None:
    from gxpo_trainer.rules.registry import make_rule

    found = learner(stage, rule)
    chosen = make_rule(found.config.learner.rule)
    before = [p.clone() for p in found.parameters()]
    for _ in range(5):
        found.load_batch(batch())
        report = chosen.step(found)
        assert report.finite
        assert all(math.isfinite(value) for value in report.metrics.values())
    assert any(not torch.equal(old, new) for old, new in zip(before, found.parameters(), strict=True))
    found.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parking_frees_the_device_and_returns_every_bit(stage: int) -> None:
    found = learner(stage, {"name": "grpo"}, loss={"kl_beta": 0.05})
    found.load_batch(batch())
    found.backward()
    found.optimizer_step()
    before = [p.clone() for p in found.parameters()]
    held = torch.cuda.memory_allocated()
    released = found.park()
    assert torch.cuda.memory_allocated() <= held - released
    found.unpark()
    assert all(torch.equal(old, new) for old, new in zip(before, found.parameters(), strict=True))
    found.load_batch(batch())
    assert math.isfinite(found.backward().loss)
    found.close()
