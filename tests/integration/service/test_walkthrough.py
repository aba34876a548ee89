"""Pages as their readers follow them, run by bash against a real API: the curl lines of docs/service.md, and the
commands of the quick start and the tutorials that need a service."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from support.finished_runs import finish, trainer
from support.walkthrough import Reader, blocks, install_the_rule

from gxpo_services.db.database import Database
from gxpo_trainer import plugins

PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_the_curl_lines_work(url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    where, submit, look, end = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "TOKEN=" in where
    env = {**os.environ, "GXPO_URL": url, "TOKEN": token_for("submitter"), "no_proxy": "127.0.0.1"}

    def bash(script: str, **more: str) -> str:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=env | more,
        )
        assert ended.returncode == 0, f"{script}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    printed = bash(submit + '\necho "run:$RUN"')
    run_id = printed.rpartition("run:")[2].strip()
    assert bash(submit + '\necho "run:$RUN"').rpartition("run:")[2].strip() == run_id, "its key makes one run"
    finish(url, database, run_id, [0.0, 0.25, 0.5])
    seen = bash(look, RUN=run_id)
    assert '"state":"succeeded"' in seen
    assert '"reward/mean":{"x":[1.0,2.0],"y":[0.25,0.25]' in seen
    assert '"evidence"' in bash(end, RUN=run_id)
    with zipfile.ZipFile(tmp_path / "export.zip") as export:
        assert len(export.namelist()) == 3
    assert '"items":[]' in bash('curl -fsS "$GXPO_URL/api/v1/runs" -H "Authorization: Bearer $TOKEN"')


def test_the_commands_for_administrators_work(url: str, token_for: Callable[[str], str], tmp_path: Path) -> None:
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    reader = Reader(tmp_path, PATH=path, GXPO_URL=url, GXPO_TOKEN=token_for("admin"), no_proxy="127.0.0.1")
    reader.follow("tutorials/run-for-a-team.md", needs=frozenset({"service"}))
    names = reader.run("bash", "gxpo token list")
    assert "ada" in names
    assert "ci" in names


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_quick_start_submits_a_run_and_follows_it_to_its_end(
    url: str, database: Database, token_for: Callable[[str], str], tmp_path: Path
) -> None:
    with trainer(url, database, lambda _: [0.25, 0.5]):
        reader = Reader(tmp_path, GXPO_URL=url, GXPO_TOKEN=token_for("submitter"), no_proxy="127.0.0.1")
        reader.follow("quickstart.md", needs=frozenset({"service"}))
    assert "succeeded" in reader.run("bash", ".venv/bin/gxpo runs")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_service_that_lists_the_rule_of_the_tutorial_states_the_cost_of_its_sweep(
    app: FastAPI, url: str, token_for: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install_the_rule(tmp_path)))
    plugins._registered.cache_clear()
    reader = Reader(tmp_path, GXPO_URL=url, GXPO_TOKEN=token_for("submitter"), no_proxy="127.0.0.1")
    (sweep,) = [block.text for block in blocks("tutorials/write-a-rule.md") if block.needs == "service"]
    try:
        refused = reader.run("bash", f"! {sweep.partition(chr(10))[2]}")
        assert "config.learner.rule.name: is not allowed on this server; choose from grpo, " in refused
        app.state.settings = app.state.settings.model_copy(update={"allowed_plugins": ("lookahead",)})
        printed = reader.run("bash", sweep)
    finally:
        plugins._registered.cache_clear()
    assert "9 runs" in printed, printed
    assert "270 backward passes" in printed, printed
    assert reader.run("bash", ".venv/bin/gxpo runs").startswith("no matching runs"), "nothing was submitted"
