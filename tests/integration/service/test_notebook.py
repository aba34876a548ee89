"""docs/tutorials/compare_runs.ipynb and the code of its page against a real API.

A thread reports for the runs of the notebook what a trainer would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from fastapi import FastAPI
from support.reported_runs import finish, trainer
from support.walkthrough import Reader, blocks, install_the_rule

import gxpo
from gxpo_client.errors import InvalidRequest
from gxpo_services.db.database import Database
from gxpo_trainer import plugins

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

NOTEBOOK = Path(__file__).parents[3] / "docs" / "tutorials" / "compare_runs.ipynb"
RUNS = 4
ACCURACIES = {"grpo": [0.25, 0.25, 0.5], "gxpo": [0.25, 0.5, 0.75]}


@pytest.fixture(autouse=True)
def _in_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_URL", url)
    monkeypatch.delenv("GXPO_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_notebook_submits_waits_compares_and_plots(
    url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GXPO_TOKEN", token_for("submitter"))
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    with trainer(database, lambda run: ACCURACIES[run.rule]):
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102
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


def test_the_code_of_the_page_submits_a_run(
    token_for: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gxpo-home").mkdir()
    (tmp_path / "gxpo-home" / "token").write_text(token_for("submitter") + "\n")
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
    with pytest.raises(InvalidRequest, match=run):  # it was never evaluated
        client.compare(run)
    (tmp_path / "mine.toml").write_text("[budget]\nsteps = 3\n")
    trainer = gxpo.Trainer(settings={"budget.steps": 7}, name="mine")
    ids = [client.submit(what, ["seed=5"], tags=["t"]) for what in (tmp_path / "mine.toml", trainer, trainer.config)]
    submitted = [client.api.run(each) for each in ids]
    assert [each["progress"]["step_budget"] for each in submitted] == [3, 7, 7]
    assert all((each["seed"], each["tags"]) == (5, ["t"]) for each in submitted)
    assert submitted[1]["name"] == "mine"


# Pages as their readers follow them, run by bash against a real API: the curl lines of docs/service.md, and the
# commands of the quick start and the tutorials that need a service.


PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_the_curl_lines_work(url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    where, submit, look, end = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "TOKEN=" in where
    reader = Reader(tmp_path, GXPO_URL=url, TOKEN=token_for("submitter"), no_proxy="127.0.0.1")
    run_id, again = (reader.run("bash", submit + '\necho "run:$RUN"').rpartition("run:")[2].strip() for _ in range(2))
    assert run_id == again, "its key makes one run"
    finish(database, run_id, [0.0, 0.25, 0.5])
    seen = reader.run("bash", look, {"RUN": run_id})
    assert '"state":"succeeded"' in seen
    assert '"reward/mean":{"x":[1.0,2.0],"y":[0.25,0.25]' in seen
    assert '"evidence"' in reader.run("bash", end, {"RUN": run_id})
    with zipfile.ZipFile(tmp_path / "export.zip") as export:
        assert len(export.namelist()) == 3
    listed = reader.run("bash", 'curl -fsS "$GXPO_URL/api/v1/runs" -H "Authorization: Bearer $TOKEN"')
    assert '"items":[]' in listed


def test_the_commands_for_administrators_work(url: str, token_for: Callable[[str], str], tmp_path: Path) -> None:
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    reader = Reader(tmp_path, PATH=path, GXPO_URL=url, GXPO_TOKEN=token_for("admin"), no_proxy="127.0.0.1")
    reader.follow("tutorials/run-for-a-team.md", needs=frozenset({"service"}))
    names = reader.run("bash", "gxpo token list")
    assert "ada" in names
    assert "ci" in names


def test_the_quick_start_submits_a_run_and_follows_it_to_its_end(
    url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path
) -> None:
    with trainer(database, lambda _: [0.25, 0.5]):
        reader = Reader(tmp_path, GXPO_URL=url, GXPO_TOKEN=token_for("submitter"), no_proxy="127.0.0.1")
        reader.follow("quickstart.md", needs=frozenset({"service"}))
    assert "succeeded" in reader.run("bash", ".venv/bin/gxpo runs")


def test_a_service_that_lists_the_rule_of_the_tutorial_states_the_cost_of_its_sweep(
    app: FastAPI, url: str, token_for: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install_the_rule(tmp_path)))
    plugins._registered.cache_clear()
    reader = Reader(tmp_path, GXPO_URL=url, GXPO_TOKEN=token_for("submitter"), no_proxy="127.0.0.1")
    (sweep,) = [block.text for block in blocks("tutorials/write-a-rule.md") if block.needs == "service"]
    try:
        refused = reader.run("bash", f"! {sweep.partition(chr(10))[2]}")
        assert "grid.learner.rule.name: is not allowed on this server; choose from grpo, " in refused
        app.state.settings = app.state.settings.model_copy(update={"allowed_plugins": ("lookahead",)})
        printed = reader.run("bash", sweep)
    finally:
        plugins._registered.cache_clear()
    assert "9 runs" in printed, printed
    assert "270 backward passes" in printed, printed
    assert reader.run("bash", ".venv/bin/gxpo runs").startswith("no matching runs"), "nothing was submitted"
