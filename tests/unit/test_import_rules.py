"""Reading a config, answering `--help` and grading load no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
