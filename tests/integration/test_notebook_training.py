"""docs/tutorials/train_in_a_notebook.ipynb, cell by cell in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gxpo_trainer.config.io import load_run
from gxpo_trainer.reporting.reading import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long("gxpo.Trainer with engines; its settings and tables without")]
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "train_in_a_notebook.ipynb"


def test_the_notebook_trains_with_a_function_of_its_own(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    shown = 'print(metrics["reward/brevity"].to_dict(), run.ended)\nprint(gxpo.Run("runs/notebook").evaluations())\n'
    script.write_text("\n".join("".join(cell["source"]) for cell in cells) + "\n" + shown, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs" / "notebook"
    rows = read_metrics(run)
    expected = {row["step"]: row["metrics"]["reward/brevity"] for row in rows if "reward/brevity" in row["metrics"]}
    assert set(expected) == {1, 2}
    assert all(0 < value < 1 for value in expected.values())
    assert "steps" in ended.stdout
    for value in expected.values():
        assert str(value) in ended.stdout
    # The folder is that of `gxpo train`, which can go on with it.
    module, _, name = load_run(run / "config.toml").verifier.rewards[1].name.partition(":")
    assert name == "brevity"
    assert "def brevity" in (run / f"{module}.py").read_text()
    assert any((run / "checkpoints").iterdir())
