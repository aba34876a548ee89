"""The DeepSpeed learner in bf16 on one CUDA device, at every ZeRO stage that it supports there."""

from __future__ import annotations

import gc
import math
import os
import pickle
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, with_scale
from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.models import load_policy
from gxpo_trainer.learner.setup import choose_kernels, installed_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")]
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


def learner(stage: int, rule: dict[str, Any], *, attention: str = "auto", **settings: Any) -> Any:
    from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = RunConfig.model_validate(
        {
            "learner": {"precision": "bf16", "zero_stage": stage, "rule": rule, **settings},
            "model": {"max_length": 256, "attention": attention},
        }
    )
    return DeepSpeedLearner(config, master_port=port, device="gpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_five_steps_in_bf16_are_finite_and_move_the_weights(stage: int, rule: dict[str, Any]) -> None:
    from gxpo_trainer.rules.contract import make_rule

    made = learner(stage, rule)
    chosen = make_rule(made.config.learner.rule)
    before = [p.clone() for p in made.parameters()]
    for _ in range(5):
        made.load_batches([batch()])
        report = chosen.step(made)
        assert report.finite
        assert all(math.isfinite(value) for value in report.metrics.values())
    assert any(not torch.equal(old, new) for old, new in zip(before, made.parameters(), strict=True))
    made.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parking_frees_the_device_and_returns_every_bit(stage: int) -> None:
    made = learner(stage, {"name": "grpo"}, loss={"kl_beta": 0.05})
    made.load_batches([batch()])
    made.backward()
    made.optimizer_step()
    before = [p.clone() for p in made.parameters()]
    held = torch.cuda.memory_allocated()
    released = made.park()
    assert torch.cuda.memory_allocated() <= held - released
    made.parking.unpark()
    assert all(torch.equal(old, new) for old, new in zip(before, made.parameters(), strict=True))
    made.load_batches([batch()])
    assert math.isfinite(made.backward().loss)
    made.close()


def test_rows_are_packed_by_default_where_a_kernel_takes_their_boundaries() -> None:
    made = learner(2, {"name": "grpo"})
    kernels = installed_kernels("gpu")
    expected = next((name for name in ("flash_attention_2", "varlen") if name in kernels), None)
    rows = f"{expected} over packed rows" if expected else "sdpa over padded rows"
    assert made.attention == f"{rows}, {choose_kernels(made.config, 'gpu')} kernels"
    made.close()


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_variable_length_attention_has_padded_rows_gradient(attention: str, layout: str, checkpointing: bool) -> None:
    kernels = installed_kernels("gpu")
    if attention not in kernels:
        pytest.skip(f"{attention} cannot run here: {kernels}")
    norms, gradients = [], []
    for chosen, rows in ((attention, layout), ("sdpa", "padded")):
        made = learner(2, {"name": "grpo"}, attention=chosen, packing=rows, optimizer={"max_grad_norm": math.inf})
        if checkpointing:
            made.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.load_batches([batch()])
        norms.append(made.backward().grad_norm)
        gradients.append(torch.cat([g.clone() for g in made.gradients()]))
        made.close()
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    # bf16 keeps 8 bits; two kernels round in another order.
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.03


def test_a_policy_is_loaded_onto_the_device_without_a_second_copy() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    device = torch.device("cuda:0")
    model = load_policy(RunConfig().model, precision="bf16", device=device)
    size = sum(p.nbytes for p in model.parameters())
    assert {p.device for p in model.parameters()} == {device}
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size


@pytest.mark.parametrize("stage", [1, 2])
def test_the_reference_is_on_the_device_during_its_pass_only(stage: int) -> None:
    held = []
    for beta in (0.0, 0.05):
        made = learner(stage, {"name": "grpo"}, loss={"kl_beta": beta})
        made.load_batches([batch()])
        made.backward()
        made.optimizer_step()
        made.load_batches([batch()])
        held.append(torch.cuda.memory_allocated())
        made.close()
        del made
        gc.collect()
    reference = sum(p.nbytes for p in load_policy(RunConfig().model, precision="bf16").parameters())
    assert held[1] - held[0] < 0.1 * reference


def test_a_bucket_in_expandable_segments_reaches_another_process() -> None:
    """Shared GPUs use plain segments until this passes on the machine in question."""
    sender = (
        "import sys, torch, pickle\n"
        "from torch.multiprocessing import reductions\n"
        "buffer = torch.arange(2**22, dtype=torch.int32, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "sys.stdout.buffer.write(pickle.dumps(reductions.reduce_tensor(buffer)[1])); sys.stdout.flush()\n"
        "sys.stdout.close(); sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(
        [sys.executable, "-c", sender], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        handle = pickle.loads(process.stdout.read())  # noqa: S301  # of our own process
        received = reductions.rebuild_cuda_tensor(*handle)  # type: ignore[no-untyped-call]
        assert int(received.sum(dtype=torch.int64)) == 2**21 * (2**22 - 1)
        process.communicate()
