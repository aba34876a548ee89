"""`gxpo demo` from its first line to its last: service, queue, scheduler, ingest, watching, comparison and report.

Processes are real and talk over HTTP. Ray and the engines are left out, whose four starts alone take longer than all
of this: trainers are stand-ins that do everything but train.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select
from support import stand_in_demo

from gxpo_services.cli.arguments import register
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.local.demo import TASKS
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.config.tasks import EMBEDDED_TASKS

TASK = TASKS["word_problems"]
STEPS, PASSES = 5, 15
"""Stand-ins take three passes a step, by any rule."""
LONG_S = 300


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Its folder, and what it printed. The folder that was asked for holds something already."""
    wanted = tmp_path_factory.mktemp("runs") / "demo"
    wanted.mkdir()
    (wanted / "mine").write_text("")
    command = [sys.executable, stand_in_demo.__file__, str(wanted), str(PASSES), "word_problems"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    return wanted.with_name("demo-2"), ended


Demo = tuple[Path, subprocess.CompletedProcess[str]]


def test_it_runs_the_rules_and_the_control_two_at_a_time(demo: Demo) -> None:
    home, ended = demo
    assert ended.returncode == 0, ended.stderr
    assert [entry.name for entry in home.with_name("demo").iterdir()] == ["mine"], "nothing is overwritten"
    with closing(Database(f"sqlite:///{home / 'gxpo.sqlite'}")) as database, database.reading() as session:
        runs = list(session.scalars(select(Run).order_by(Run.created_at)))
    assert [(run.name, run.state, run.reason, run.launch, run.step) for run in runs] == [
        (name, "succeeded", "budget_reached", 1, STEPS) for name in TASK.presets
    ]
    assert len({run.group_number for run in runs} - {None}) == 1
    for run in runs:
        others = [other for other in runs if other.started_at <= run.started_at < other.ended_at]
        assert len(others) <= 2, "each run itself, and one other"


def test_it_shows_progress_the_comparison_and_where_the_report_is(demo: Demo) -> None:
    home, ended = demo
    for name in TASK.presets:
        assert re.search(rf"{name}: succeeded  step {STEPS} .*passes {PASSES}/{PASSES}", ended.stderr)
    # By any rule stand-ins take three passes a step and solve step / 200 of the problems: best, at step, steps and
    # passes to match the baseline.
    for rule in ("GRPO lr 0.00048", "GRPO lr 0.00084", r"SFPO K=\d+ lr 0.00096", r"GXPO K=\d+ lr 0.00024"):
        assert re.search(rf"{rule} +2\.5% +5 +5 \(1\.00×\) +15 \(1\.00×\)", ended.stdout), rule
    assert "Inconclusive: only one shared seed. Run at least 3." in ended.stdout
    study = "The reference study, on several seeds (docs/evidence.md):\n- Arms against GRPO: 9, on 5 seeds"
    assert study in ended.stdout
    assert f"Report: {home / 'report.md'}\nCurves: {home / 'curves.png'}" in ended.stdout
    assert TASK.title in (home / "report.md").read_text(encoding="utf-8")
    assert (home / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_task_of_the_command_trains_presets_on_its_problems() -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    for name, task in TASKS.items():
        assert parser.parse_args(["demo", "--task", name]).task == name
        assert {load_preset(preset).data.source for preset in task.presets} == {name}
    assert set(TASKS) == set(EMBEDDED_TASKS)
    assert parser.parse_args(["demo"]).task == "word_problems"


def test_nothing_of_it_is_left_running(demo: Demo) -> None:
    home, _ = demo
    assert not (home / "up.json").exists()
    command_lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in command_lines if str(home) in line] == []
    for folder in (home / "artifacts").iterdir():
        outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
        assert outcome["outcome"] == "succeeded"
