"""Liger's kernels against transformers' own layers: on a GPU, or where Triton interprets its programs on a CPU
(`make gpu-dry`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_families import save_family
from support.tiny_policy import gradient_vector, random_batch

from gxpo_trainer.algo.packing import pack
from gxpo_trainer.config import ModelConfig
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.learner.models import load_policy
from gxpo_trainer.planner.architectures import FUSED_KERNELS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device is visible"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter lacks: functions of CUDA's library, and methods of a number that is an argument."""
    if not INTERPRETED:
        return
    import numpy as np
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_numbers)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


@pytest.mark.parametrize("family", sorted(FUSED_KERNELS))
def test_log_probabilities_and_gradient_are_those_of_eager_layers(family: str, tmp_path: Path) -> None:
    """In fp32; the largest differences interpreted: 4e-6 in a logit, 1.4e-6 of a gradient.

    Liger replaces the family's classes in this process, so the eager policy comes first.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(path=str(save_family(tmp_path, family)))
    batch = random_batch(num_prompts=1, num_samples=2, seed=3)
    micros = pack(batch, token_budget=10_000, layout="padded", aggregation="token_mean", pad_id=0)
    found = []
    for kernels, recompute in (("eager", False), ("liger", False), ("liger", True)):
        chosen = config.model_copy(update={"kernels": kernels, "gradient_checkpointing": recompute})
        policy = PolicyModule(load_policy(chosen, precision="fp32", device=device if device.type == "cuda" else None))
        backbone: Any = policy.backbone
        layers = {layer.forward.__module__.partition(".")[0] for layer in (backbone.layers[0].mlp, backbone.norm)}
        outs = [policy(micro.to(device), 1.0, False).logprobs for micro in micros]
        torch.cat(outs).square().sum().backward()  # type: ignore[no-untyped-call]
        found.append((layers, torch.cat(outs).detach(), gradient_vector(policy)))
    eager, *fused = found
    assert eager[0] == {"transformers"}
    for layers, logprobs, gradient in fused:
        assert layers == {"liger_kernel"}
        assert (logprobs - eager[1]).abs().max() < 2e-5
        assert (gradient - eager[2]).norm() / eager[2].norm() < 1e-5
