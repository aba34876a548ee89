"""Folders of deleted runs when a process is killed within the deletion."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support import queued_runs as runs

from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.outputs import files
from gxpo_services.run_states import RunState
from gxpo_services.runs import service
from gxpo_services.settings import ServiceSettings

KILLED_BEFORE_THE_COMMIT = """
import os, signal, sys
from pathlib import Path
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.runs import service

url, root, run_id = sys.argv[1:]
with Database(url).writing() as session:
    service.delete(session, Path(root), Principal("t0", "admin", Role.ADMIN), run_id)
    assert not (Path(root) / run_id).exists()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_id(database: Database, settings: ServiceSettings) -> str:
    """A run that has ended, with a file."""
    ended = runs.add_run(database, state=RunState.FAILED)
    (settings.artifacts / ended).mkdir(parents=True)
    (settings.artifacts / ended / "metrics.jsonl").write_text("{}\n")
    return ended


def aside(root: Path) -> list[str]:
    return [entry.name.partition("-")[0] for entry in (root / files.TRASH).iterdir()]


def test_a_kill_before_the_commit_costs_a_run_no_file(
    app: FastAPI, run_id: str, database: Database, settings: ServiceSettings
) -> None:
    root = settings.artifacts
    ended = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_COMMIT, settings.url, str(root), run_id])
    assert ended.returncode == -signal.SIGKILL
    assert aside(root) == [run_id]
    files.empty_trash(root, database)
    assert aside(root) == [run_id], "the run still exists"
    with TestClient(app):
        assert (root / run_id / "metrics.jsonl").read_text() == "{}\n"
    assert aside(root) == []


def test_a_start_removes_deleted_runs(app: FastAPI, run_id: str, database: Database, settings: ServiceSettings) -> None:
    root = settings.artifacts
    (root / files.TRASH).mkdir()
    (root / run_id).rename(root / files.TRASH / f"{run_id}-0a1b2c3d")
    with database.writing() as session:
        session.delete(runs.get(database, run_id))
    with TestClient(app):
        assert aside(root) == []
    assert not (root / run_id).exists()


def test_another_deletion_leaves_an_uncommitted_one(run_id: str, database: Database, settings: ServiceSettings) -> None:
    root = settings.artifacts
    with database.writing() as session:
        service.delete(session, root, Principal("t0", "admin", Role.ADMIN), run_id)
        files.empty_trash(root, database)
        assert aside(root) == [run_id]
    files.empty_trash(root, database)
    assert aside(root) == []
