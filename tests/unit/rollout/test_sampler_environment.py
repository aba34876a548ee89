"""Environment variables set before vLLM is imported."""

from __future__ import annotations

import os

import pytest

from gxpo_trainer.rollout.requests import SamplerSettings
from gxpo_trainer.rollout.sampler import set_environment


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary environment without the variables under test."""
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("device", "eager", "compiles"), [("cpu", True, False), ("cpu", False, True), ("gpu", True, True)]
)
def test_eager_cpu_sampler_disables_torch_compile(empty: None, device: str, eager: bool, compiles: bool) -> None:
    set_environment(SamplerSettings("model", 64, device=device, enforce_eager=eager))  # type: ignore[arg-type]
    assert ("TORCH_COMPILE_DISABLE" not in os.environ) == compiles
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (device == "cpu")


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"), [("gpu", True, "1"), ("gpu", False, None), ("cpu", True, None)]
)
def test_deterministic_gpu_sampler_uses_batch_invariant_kernels(
    empty: None, device: str, deterministic: bool, expected: str | None
) -> None:
    set_environment(SamplerSettings("model", 64, device=device, deterministic=deterministic))  # type: ignore[arg-type]
    assert os.environ.get("VLLM_BATCH_INVARIANT") == expected


def test_vllm_knows_the_variable_for_batch_invariant_kernels() -> None:
    """vLLM ignores variables that it does not know."""
    from vllm import envs

    assert "VLLM_BATCH_INVARIANT" in envs.environment_variables


def test_variables_set_by_the_user_are_kept(empty: None) -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    set_environment(SamplerSettings("model", 64))
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0"
