"""The order of the queue, quotas, the process of the scheduler, and what it deletes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import ColumnElement, event, func, insert, select
from sqlalchemy.orm import Session
from structlog.testing import capture_logs
from support.scheduling import Cluster
from support.service_processes import SCHEDULER, until

from gxpo_services.api.idempotency import Creation, delete_expired_keys
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import IdempotencyKey, Run, Sample
from gxpo_services.run_states import RunState
from gxpo_services.runs import lifecycle
from gxpo_services.runs.schemas import CloneRequest
from gxpo_services.scheduling import leases, scheduler as module
from gxpo_services.scheduling.decisions import OVERSIZED_S, Candidate
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig

pytestmark = pytest.mark.each_database

S = RunState


EXPLICIT = RunConfig.model_validate(
    {"placement": {"learner_cpus": 2.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25}}
).model_dump(mode="json")
"""3 CPUs, of which none is automatic."""


def test_a_run_larger_than_the_cluster_fails_once_the_cluster_had_time_to_grow(cluster: Cluster) -> None:
    cluster.launcher.capacity = (2.0, 0.0)
    scheduler = cluster.scheduler()
    too_large = cluster.add_run(cpus=3.0, config=EXPLICIT)
    on_gpu = RunConfig.model_validate({"placement": {"device": "gpu"}}).model_dump(mode="json")
    grows = cluster.add_run(gpus=1.0, config=on_gpu)
    auto = cluster.add_run(cpus=3.0)
    behind = cluster.add_run(cpus=0.5, config=EXPLICIT)
    scheduler.tick()
    assert cluster.get(auto).state == S.STARTING, "automatic shares fit, and what cannot start holds up nobody"
    assert cluster.get(behind).state == S.QUEUED, "both CPUs are held"
    cluster.launcher.capacity = (2.0, 1.0)
    cluster.clock.passes(OVERSIZED_S / 2)
    scheduler.tick()
    assert cluster.get(too_large).state == S.QUEUED
    cluster.clock.passes(OVERSIZED_S / 2)
    scheduler.tick()
    failed = cluster.get(too_large)
    assert (failed.state, failed.reason, failed.lease_owner) == (S.FAILED, "no_resources", None)
    assert "3 CPUs" in failed.detail
    assert cluster.get(grows).state == S.QUEUED


def test_the_queue_is_fair_and_keeps_to_the_quota(cluster: Cluster) -> None:
    many = [cluster.add_run(created_by_id="many", queued_at=float(n)) for n in range(4)]
    late = cluster.add_run(created_by_id="other", queued_at=100.0)
    urgent = cluster.add_run(created_by_id="many", queued_at=200.0, priority=1)
    scheduler = cluster.scheduler(max_concurrent_runs=2)
    begun: list[set[str]] = []
    for _ in range(5):
        scheduler.tick()
        begun.append({job.id.removesuffix("-1") for job in cluster.launcher.submitted} - set().union(*begun))
        executing = [run_id for run_id in [urgent, late, *many] if cluster.get(run_id).state == S.STARTING]
        assert len(executing) <= 2
        cluster.move(executing[0], S.FAILED)
    # The first two; then, as one ends each time, the submitter's other runs in the order in which they came.
    assert begun == [{urgent, late}, {many[0]}, {many[1]}, {many[2]}, {many[3]}]


def test_a_submitter_has_no_more_than_their_share_of_executing_runs(cluster: Cluster) -> None:
    first, second = (cluster.add_run(created_by_id="many", queued_at=float(n)) for n in range(2))
    other = cluster.add_run(created_by_id="other", queued_at=2.0)
    scheduler = cluster.scheduler(max_runs_per_user=1)
    scheduler.tick()
    assert {job.id for job in cluster.launcher.submitted} == {f"{first}-1", f"{other}-1"}
    cluster.move(first, S.FAILED)
    scheduler.tick()
    assert cluster.launcher.submitted[-1].id == f"{second}-1"


@pytest.mark.parametrize("too_large", [False, True])
def test_a_run_that_is_cancelled_while_the_queue_is_read_is_passed_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, too_large: bool
) -> None:
    """PostgreSQL lets others write between the statements of a claim; here the claim itself does it."""
    cluster.launcher.capacity = (2.0, 0.0)
    cancelled = cluster.add_run(cpus=3.0 if too_large else 1.0, config=EXPLICIT, queued_at=0.0)
    scheduler = cluster.scheduler(max_concurrent_runs=1)
    if too_large:
        scheduler.tick()
        cluster.clock.passes(OVERSIZED_S)
    other, real = cluster.add_run(queued_at=1.0), leases.candidates

    def candidates(session: Session, condition: ColumnElement[bool]) -> list[Candidate]:
        listed = real(session, condition)
        run = session.scalar(select(Run).where(Run.id == cancelled, Run.state == S.QUEUED))
        if run is not None:
            lifecycle.move(session, run, S.CANCELLED, actor="tests", message="")
            session.expunge(run)
        return listed

    monkeypatch.setattr(leases, "candidates", candidates)
    scheduler.tick()
    scheduler.tick()
    assert (cluster.get(cancelled).state, cluster.get(other).state) == (S.CANCELLED, S.STARTING)


@pytest.mark.parametrize("blind", ["at its limit", "without launcher", "suspended"])
def test_time_in_which_no_round_saw_the_cluster_does_not_count(cluster: Cluster, blind: str) -> None:
    cluster.launcher.capacity = (2.0, 0.0)
    scheduler = cluster.scheduler(max_concurrent_runs=1)
    too_large = cluster.add_run(cpus=3.0, config=EXPLICIT)
    scheduler.tick()
    if blind == "at its limit":
        small = cluster.add_run()
        scheduler.tick()
        cluster.rounds(scheduler, OVERSIZED_S)
        cluster.move(small, S.FAILED)
    elif blind == "without launcher":
        cluster.launcher.away = True
        cluster.rounds(scheduler, OVERSIZED_S)
        cluster.launcher.away = False
    else:
        cluster.clock.passes(OVERSIZED_S + 1)
    scheduler.tick()
    assert cluster.get(too_large).state == S.QUEUED, "seen twice, a minute apart"
    cluster.rounds(scheduler, OVERSIZED_S)
    assert cluster.get(too_large).state == S.FAILED


def test_a_quota_takes_the_place_of_the_clusters_size(cluster: Cluster) -> None:
    first, second = (cluster.add_run(cpus=1.5, queued_at=float(n)) for n in range(2))
    scheduler = cluster.scheduler(quota_cpus=2.0, quota_gpus=0.0)
    scheduler.tick()
    assert [job.id for job in cluster.launcher.submitted] == [f"{first}-1"]
    assert ("resources", "") not in cluster.launcher.calls
    assert cluster.get(second).state == S.QUEUED


def test_one_run_that_cannot_be_advanced_does_not_stop_the_others(cluster: Cluster) -> None:
    ids = sorted(cluster.add_run() for _ in range(3))

    def broken(verb: str, job_id: str) -> None:
        if verb == "submit" and job_id.startswith(ids[1]):
            raise ValueError("odd")

    cluster.launcher.before = broken
    scheduler = cluster.scheduler()
    scheduler.tick()
    scheduler.tick()
    assert sorted(job.id for job in cluster.launcher.submitted) == [f"{ids[0]}-1", f"{ids[2]}-1"]
    cluster.launcher.before = lambda verb, job_id: None
    scheduler.tick()
    assert len(cluster.launcher.submitted) == 3


def test_the_process_ends_cleanly_when_it_is_told_to(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    run_id = cluster.add_run(state=S.CANCELLING, launch=1, job_id="gone-1", request_at=0.0)
    environment = {**os.environ, "GXPO_HOME": str(tmp_path / "home"), "GXPO_DATABASE_URL": database_url}
    process = subprocess.Popen([sys.executable, *SCHEDULER], env=environment)
    try:
        until(lambda: cluster.get(run_id).state == S.CANCELLED, "the run that nobody held to be taken over")
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
        assert module.is_alive(tmp_path / "home")
    finally:
        process.kill()
        process.wait()


def test_a_scheduler_without_a_recent_round_fails_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GXPO_HOME", str(tmp_path))

    def check() -> tuple[int, str]:
        return cli.main(["scheduler", "--check"]), capsys.readouterr().out

    assert check() == (1, "no round within 120 s\n")
    (tmp_path / module.LIVENESS_FILE).touch()
    assert check() == (0, "a round within 120 s\n")
    for seconds in (-module.LONGEST_ROUND_S - 1, module.LONGEST_ROUND_S + 3600):  # the latter: the clock was set back
        at = time.time() + seconds
        os.utime(tmp_path / module.LIVENESS_FILE, (at, at))
        assert check() == (1, "no round within 120 s\n")


# Retention deletes samples and logs of runs that ended long ago, and nothing else.


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


def left(cluster: Cluster, run_id: str) -> tuple[int, list[str]]:
    """Number of samples; files."""
    folder = cluster.settings.artifacts / run_id
    with cluster.database.reading() as session:
        query = select(func.count()).select_from(Sample).where(Sample.run_number == cluster.get(run_id).number)
        return session.scalar(query) or 0, [name for name in FILES if (folder / name).exists()]


def test_only_runs_past_the_limit_lose_samples_and_log(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_AT_ONCE", 2)
    monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    old = ended(cluster, cluster.clock.now - 31 * DAY_S, samples=5)
    young = ended(cluster, cluster.clock.now - 29 * DAY_S, samples=1)
    paused = ended(cluster, None, samples=1, state=RunState.PAUSED)
    outside = cluster.settings.artifacts / "outside"
    outside.write_text("x")
    (cluster.settings.artifacts / old / "train.log").unlink()
    (cluster.settings.artifacts / old / "train.log").symlink_to(outside)
    cluster.scheduler("without the setting").tick()
    assert left(cluster, old) == (5, list(FILES))
    scheduler = cluster.scheduler(retention_days=30.0)
    scheduler.tick()
    assert left(cluster, old) == (1, list(FILES)), "two batches of two"
    cluster.clock.passes(1.0)
    scheduler.tick()
    assert left(cluster, old) == (0, ["metrics.jsonl"])
    assert cluster.get(old).pruned_at == cluster.clock.now
    assert cluster.messages(old)[-1][0] == "pruned"
    for kept in (young, paused):
        assert left(cluster, kept) == (1, list(FILES))
    for seconds in (2 * DAY_S, module.CLEAN_EVERY_S):
        cluster.clock.passes(seconds)
        scheduler.tick()
    assert left(cluster, young) == (0, ["metrics.jsonl"])
    assert len(cluster.messages(old)) == 1, "pruned once"
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
            cluster.clock.passes(module.CLEAN_EVERY_S)
    assert left(cluster, good) == (0, ["metrics.jsonl"])
    skipped = [entry["run"] for entry in logged if entry["event"] == "cannot delete the files of a run"]
    assert skipped == bad, "once each"
    (cluster.settings.artifacts / bad[0] / "train.log").rmdir()
    for _ in range(3):
        scheduler.tick()
        cluster.clock.passes(module.CLEAN_EVERY_S)
    assert [cluster.get(run_id).pruned_at is not None for run_id in bad] == [True, False, False]


# Idempotency keys are kept for a week.


NOW = 1_800_000_000.0
"""Of a cluster's clock."""
WEEK_S = 7 * DAY_S


def add_keys(database: Database, *ages_s: float) -> None:
    """Keys k0, k1, … that were used so long before NOW."""
    with database.writing() as session:
        for number, age_s in enumerate(ages_s):
            key = IdempotencyKey(
                token_id="t1", key=f"k{number}", body_sha256="0" * 64, resource_id="r1", created_at=NOW - age_s
            )
            session.add(key)


def keys(database: Database) -> set[str]:
    with database.reading() as session:
        return set(session.scalars(select(IdempotencyKey.key)))


def test_keys_are_deleted_a_batch_at_a_time_after_a_week_or_as_set(cluster: Cluster, database: Database) -> None:
    add_keys(database, 0, WEEK_S - 1, *[WEEK_S + 1] * (module.CLEANED_AT_ONCE + 1))
    scheduler = cluster.scheduler()
    left = []
    for seconds in (0, 2, module.CLEAN_EVERY_S):
        cluster.clock.passes(seconds)
        scheduler.tick()
        left.append(keys(database))
    assert {"k0", "k1"} < left[0], "younger ones are kept"
    assert [len(each) for each in left] == [3, 3, 1], "it does not look in every round"
    assert left[2] == {"k0"}
    cluster.scheduler(idempotency_s=module.CLEAN_EVERY_S).tick()
    assert keys(database) == set()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_key_that_vanishes_is_free(database: Database, database_url: str, settings: ServiceSettings) -> None:
    """PostgreSQL alone lets others write between two statements of a transaction."""
    add_keys(database, 2 * WEEK_S)
    other = Database(database_url)
    deleted = []

    def delete_it(*arguments: Any) -> None:
        if arguments[2].startswith("INSERT INTO idempotency_keys") and not deleted:
            with other.writing() as session:
                deleted.append(delete_expired_keys(session, NOW, 10))

    event.listen(database.engine, "after_cursor_execute", delete_it)
    with database.writing() as session:
        request = Creation(Principal("t1", "me", Role.ADMIN), settings, session, request=None, key="k0")
        made, earlier = request.claim("clone r1", CloneRequest(), Run)
        assert earlier is None
    other.close()
    assert deleted == [1]
    with database.reading() as session:
        assert session.get_one(IdempotencyKey, ("t1", "k0")).resource_id == made
