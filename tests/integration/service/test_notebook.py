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

import gxpo
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
    url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert {group["name"] for group in names["comparison"]["groups"]} == {"GRPO lr 0.00048", "GXPO K=5 lr 0.00024"}
    assert "2 of 2 seeds" in names["comparison"]["evidence"]
    assert names["comparison"]["missing"] == ["seeds shared with the baseline (2 of at least 3)"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in names["axes"].lines]
    assert drawn == [([0.0, 1.0, 2.0], ACCURACIES[rule]) for rule in ("grpo", "gxpo", "grpo", "gxpo")]
    assert len({line.get_color() for line in names["axes"].lines}) == 2
    assert names["metrics"]["reward/mean"].to_dict() == {(run, step): 0.25 for run in names["runs"] for step in (1, 2)}
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
    monkeypatch.setenv("GXPO_URL", url)
    monkeypatch.delenv("GXPO_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("tutorials/notebook.md") if block.needs == "service"]
    names: dict[str, Any] = {}
    exec(compile(block.text, "notebook.md", "exec"), names)  # noqa: S102
    client, run = names["client"], names["run"]
    assert client.api.run(run)["progress"]["step_budget"] == 10
    assert capsys.readouterr().out == "queued\n"
    with pytest.raises(TimeoutError, match=f"not ended after 0 s: .*{run}.*queued"):
        client.wait(run, timeout_s=0)
    client.api.act(run, "cancel")
    assert client.wait([run]) == {run: "cancelled"}
    (tmp_path / "mine.toml").write_text("[budget]\nsteps = 3\n")
    trainer = gxpo.Trainer(settings={"budget.steps": 7}, name="mine")
    ids = [client.submit(what, ["seed=5"], tags=["t"]) for what in (tmp_path / "mine.toml", trainer, trainer.config)]
    submitted = [client.api.run(each) for each in ids]
    assert [(each["progress"]["step_budget"], each["seed"], each["tags"]) for each in submitted] == [
        (3, 5, ["t"]), (7, 5, ["t"]), (7, 5, ["t"]),
    ]  # fmt: skip
    assert submitted[1]["name"] == "mine"
