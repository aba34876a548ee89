"""What vLLM is told before it is imported."""

from __future__ import annotations

import os

import pytest

from gxpo_trainer.rollout.requests import SamplerSettings
from gxpo_trainer.rollout.sampler import _set_environment


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of this process comes back afterwards; the settings that are asked for are not in it."""
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("device", "eager", "compiles"), [("cpu", True, False), ("cpu", False, True), ("gpu", True, True)]
)
def test_nothing_is_compiled_on_cpus_when_that_is_asked_for(
    empty: None, device: str, eager: bool, compiles: bool
) -> None:
    _set_environment(SamplerSettings("model", 64, device=device, enforce_eager=eager))  # type: ignore[arg-type]
    assert ("TORCH_COMPILE_DISABLE" not in os.environ) == compiles
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (device == "cpu")


def test_what_the_user_said_stays(empty: None) -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    _set_environment(SamplerSettings("model", 64))
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0"
