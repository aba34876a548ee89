"""Reading a config and answering `--help` load no engine; the import contracts hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "peft", "math_verify", "sympy", "pandas", "matplotlib")
PROGRAM = """
import sys
{action}
print(" ".join(name for name in {heavy} if name in sys.modules))
"""


def loaded_by(action: str) -> str:
    program = PROGRAM.format(action=action, heavy=HEAVY)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "action",
    [
        "import gxpo_trainer.config, gxpo_trainer.config.io, gxpo_trainer.types, gxpo_trainer.errors",
        "import gxpo_trainer.compare.text_tables, gxpo_trainer.planner.report",
        "import gxpo_trainer.data.prompts, gxpo_trainer.reporting.reporter, gxpo_trainer.reporting.identity",
        "from gxpo_trainer.cli import build_parser; build_parser().format_help()",
        "from gxpo_trainer.cli import main; main(['config', '--preset', 'demo'])",
        "from gxpo_trainer.cli import main; main(['config', '--schema'])",
    ],
)
def test_no_engine_is_loaded(action: str) -> None:
    assert loaded_by(action) == ""


def test_help_does_not_even_load_pydantic() -> None:
    program = "import sys; from gxpo_trainer.cli import build_parser; build_parser(); print('pydantic' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_imports_go_one_way() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
