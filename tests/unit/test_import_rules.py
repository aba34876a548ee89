"""Reading a config and answering `--help` load no engine."""

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


def test_help_does_not_even_load_pydantic() -> None:
    assert loaded_by("from gxpo_trainer.cli import build_parser; build_parser()", ("pydantic",)) == ""
