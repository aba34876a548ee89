"""Retention deletes samples and logs of runs that ended long ago, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, insert, select
from structlog.testing import capture_logs
from support.scheduling import Cluster

from gxpo_services.db.tables import Run, Sample
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import scheduler as module

pytestmark = pytest.mark.each_database

DAY_S = 86_400.0
FILES = ("train.log", "samples.jsonl", "metrics.jsonl")


def ended(cluster: Cluster, at: float | None, samples: int, **values: Any) -> str:
    run_id = cluster.add_run(**{"state": RunState.SUCCEEDED, "ended_at": at, **values})
    row = {"attempt": 1, "step": 1, "time": 1.0, "group_index": 0, "sample_index": 0, "prompt_id": "p", "prompt": "p"}
    row |= {"response": "r", "gold": "g", "verdict": "wrong", "length": 1, "truncated": False, "extra": {}}
    number = cluster.get(run_id).number
    with cluster.database.writing() as session:
        session.execute(insert(Sample), [{"run_number": number, **row} for _ in range(samples)])
    folder = cluster.settings.artifacts / run_id
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("x")
    return run_id


def num_samples(cluster: Cluster, run_id: str) -> int:
    with cluster.database.reading() as session:
        query = select(func.count()).select_from(Sample).join(Run, Run.number == Sample.run_number)
        return session.scalar(query.where(Run.id == run_id)) or 0


def left(cluster: Cluster, run_id: str) -> tuple[int, list[str]]:
    folder = cluster.settings.artifacts / run_id
    return num_samples(cluster, run_id), [name for name in FILES if (folder / name).exists()]


def test_only_runs_past_the_limit_lose_samples_and_log(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_AT_ONCE", 2)
    monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    old = ended(cluster, cluster.clock.now - 31 * DAY_S, samples=5)
    young = ended(cluster, cluster.clock.now - 29 * DAY_S, samples=1)
    paused = ended(cluster, None, samples=1, state=RunState.PAUSED)
    scheduler = cluster.scheduler(retention_days=30.0)
    scheduler.tick()
    assert num_samples(cluster, old) == 1, "two batches of two"
    for _ in range(2):
        scheduler.tick()
    assert left(cluster, old) == (0, ["metrics.jsonl"])
    assert cluster.get(old).pruned_at == cluster.clock.now
    assert cluster.messages(old)[-1][0] == "pruned"
    for kept in (young, paused):
        assert left(cluster, kept) == (1, list(FILES))
    cluster.clock.passes(2 * DAY_S)
    scheduler.tick()
    scheduler.tick()
    assert left(cluster, young) == (0, ["metrics.jsonl"])
    assert len(cluster.messages(old)) == 1, "pruned once"


def test_nothing_is_deleted_without_the_setting_and_links_lead_nowhere(cluster: Cluster) -> None:
    run_id = ended(cluster, 1.0, samples=1)
    cluster.scheduler().tick()
    assert left(cluster, run_id) == (1, list(FILES))
    outside = cluster.settings.artifacts / "outside"
    outside.write_text("x")
    (cluster.settings.artifacts / run_id / "train.log").unlink()
    (cluster.settings.artifacts / run_id / "train.log").symlink_to(outside)
    scheduler = cluster.scheduler("second", retention_days=1.0)
    cluster.clock.passes(module.CLEAN_EVERY_S)
    scheduler.tick()
    assert left(cluster, run_id) == (0, ["metrics.jsonl"])
    assert outside.exists()


def test_files_that_cannot_be_deleted_do_not_stop_other_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    bad = [ended(cluster, 1.0, samples=1) for _ in range(3)]
    for run_id in bad:
        (cluster.settings.artifacts / run_id / "train.log").unlink()
        (cluster.settings.artifacts / run_id / "train.log").mkdir()
    good = ended(cluster, 1.0, samples=1)
    scheduler = cluster.scheduler(retention_days=1.0)
    with capture_logs() as logged:
        for _ in range(5):
            scheduler.tick()
    assert left(cluster, good) == (0, ["metrics.jsonl"])
    skipped = [entry["run"] for entry in logged if entry["event"] == "cannot delete the files of a run"]
    assert skipped == bad, "once each, for now"
    (cluster.settings.artifacts / bad[0] / "train.log").rmdir()
    cluster.clock.passes(module.CLEAN_EVERY_S)
    scheduler.tick()
    assert [cluster.get(run_id).pruned_at for run_id in bad] == [cluster.clock.now, None, None]
