"""Retention deletes samples and logs of runs that ended long ago, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, insert, select
from structlog.testing import capture_logs
from support import queued_runs as runs
from support.scheduling import Clock, Make

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run, Sample
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import scheduler as module
from gxpo_services.settings import ServiceSettings

pytestmark = pytest.mark.each_database

DAY_S = 86_400.0
FILES = ("train.log", "samples.jsonl", "metrics.jsonl")


def ended(database: Database, settings: ServiceSettings, at: float | None, samples: int, **values: Any) -> str:
    run_id = runs.add_run(database, **{"state": RunState.SUCCEEDED, "ended_at": at, **values})
    row = {"attempt": 1, "step": 1, "time": 1.0, "group_index": 0, "sample_index": 0, "prompt_id": "p", "prompt": "p"}
    row |= {"response": "r", "gold": "g", "verdict": "wrong", "length": 1, "truncated": False, "extra": {}}
    number = runs.get(database, run_id).number
    with database.writing() as session:
        session.execute(insert(Sample), [{"run_number": number, **row} for _ in range(samples)])
    folder = settings.artifacts / run_id
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("x")
    return run_id


def num_samples(database: Database, run_id: str) -> int:
    with database.reading() as session:
        query = select(func.count()).select_from(Sample).join(Run, Run.number == Sample.run_number)
        return session.scalar(query.where(Run.id == run_id)) or 0


def left(database: Database, settings: ServiceSettings, run_id: str) -> tuple[int, list[str]]:
    folder = settings.artifacts / run_id
    return num_samples(database, run_id), [name for name in FILES if (folder / name).exists()]


def test_only_runs_that_ended_before_the_limit_lose_samples_and_log(
    database: Database,
    settings: ServiceSettings,
    scheduler_of: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SAMPLES_AT_ONCE", 2)
    monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    old = ended(database, settings, clock.now - 31 * DAY_S, samples=5)
    young = ended(database, settings, clock.now - 29 * DAY_S, samples=1)
    paused = ended(database, settings, None, samples=1, state=RunState.PAUSED)
    scheduler = scheduler_of(retention_days=30.0)
    scheduler.tick()
    assert num_samples(database, old) == 1, "two batches of two"
    for _ in range(2):
        scheduler.tick()
    assert left(database, settings, old) == (0, ["metrics.jsonl"])
    assert runs.get(database, old).pruned_at == clock.now
    assert runs.messages(database, old)[-1][0] == "pruned"
    for kept in (young, paused):
        assert left(database, settings, kept) == (1, list(FILES))
    clock.passes(2 * DAY_S)
    scheduler.tick()
    scheduler.tick()
    assert left(database, settings, young) == (0, ["metrics.jsonl"])
    assert len(runs.messages(database, old)) == 1, "pruned once"


def test_nothing_is_deleted_without_the_setting_and_links_lead_nowhere(
    database: Database, settings: ServiceSettings, scheduler_of: Make, clock: Clock
) -> None:
    run_id = ended(database, settings, 1.0, samples=1)
    scheduler_of().tick()
    assert left(database, settings, run_id) == (1, list(FILES))
    outside = settings.artifacts / "outside"
    outside.write_text("x")
    (settings.artifacts / run_id / "train.log").unlink()
    (settings.artifacts / run_id / "train.log").symlink_to(outside)
    scheduler = scheduler_of("second", retention_days=1.0)
    clock.passes(module.CLEAN_EVERY_S)
    scheduler.tick()
    assert left(database, settings, run_id) == (0, ["metrics.jsonl"])
    assert outside.exists()


def test_files_that_cannot_be_deleted_do_not_stop_the_other_runs(
    database: Database,
    settings: ServiceSettings,
    scheduler_of: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    bad = [ended(database, settings, 1.0, samples=1) for _ in range(3)]
    for run_id in bad:
        (settings.artifacts / run_id / "train.log").unlink()
        (settings.artifacts / run_id / "train.log").mkdir()
    good = ended(database, settings, 1.0, samples=1)
    scheduler = scheduler_of(retention_days=1.0)
    with capture_logs() as logged:
        for _ in range(5):
            scheduler.tick()
    assert left(database, settings, good) == (0, ["metrics.jsonl"])
    skipped = [entry["run"] for entry in logged if entry["event"] == "cannot delete the files of a run"]
    assert skipped == bad, "once each, for now"
    (settings.artifacts / bad[0] / "train.log").rmdir()
    clock.passes(module.CLEAN_EVERY_S)
    scheduler.tick()
    assert [runs.get(database, run_id).pruned_at for run_id in bad] == [clock.now, None, None]
