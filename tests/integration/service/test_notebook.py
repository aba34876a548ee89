"""docs/tutorials/compare_runs.ipynb and the code of its page against a real API.

A thread reports for the runs of the notebook what a trainer would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from support.finished_runs import trainer
from support.walkthrough import blocks

from gxpo_services.db.database import Database

NOTEBOOK = Path(__file__).parents[3] / "docs" / "tutorials" / "compare_runs.ipynb"
RUNS = 4
ACCURACIES = {"grpo": [0.25, 0.25, 0.5], "gxpo": [0.25, 0.5, 0.75]}


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in order, as a kernel does; their common names."""
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102
    return names


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_notebook_submits_waits_compares_and_plots(
    url: str,
    database: Database,
    token_for: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GXPO_URL", url)
    monkeypatch.setenv("GXPO_TOKEN", token_for("submitter"))
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with trainer(url, database, lambda run: ACCURACIES[run.rule]):
        names = execute(notebook)
    assert len(names["runs"]) == RUNS
    assert names["checked"]["cost"]["backward_passes"] == names["PASSES"] == 30
    assert {group["name"] for group in names["comparison"]["groups"]} == {
        "GRPO lr 0.00048",
        "GXPO K=5 lr 0.00024",
    }
    assert "2 of 2 seeds" in names["comparison"]["evidence"]
    assert names["comparison"]["missing"] == ["seeds shared with the baseline (2 of at least 3)"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in names["axes"].lines]
    assert drawn == [([0.0, 1.0, 2.0], ACCURACIES[rule]) for rule in ("grpo", "gxpo", "grpo", "gxpo")]
    assert len({line.get_color() for line in names["axes"].lines}) == 2
    points = [answer["series"]["reward/mean"] for answer in names["rewards"].values()]
    assert [(series["x"], series["y"]) for series in points] == [([1.0, 2.0], [0.25, 0.25])] * RUNS
    assert (tmp_path / "runs.zip").stat().st_size > 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_code_of_the_page_submits_a_run(
    url: str,
    token_for: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gxpo-home").mkdir()
    (tmp_path / "gxpo-home" / "token").write_text(token_for("submitter") + "\n")
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("tutorials/notebook.md") if block.language == "python"]
    assert block.needs == "service"
    code = block.text.replace("http://127.0.0.1:8000", url)
    assert url in code
    names: dict[str, Any] = {}
    exec(compile(code, "notebook.md", "exec"), names)  # noqa: S102
    assert names["run"]["progress"]["step_budget"] == 10
    assert capsys.readouterr().out == "queued\n"
