"""How the scheduler reads the end of a run, and recovers it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs
from support.reporting import body, send
from support.scheduling import PAUSE_S, Cluster, write_outcome

from gxpo_services.api.fields import new_id
from gxpo_services.db.tables import Run
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import scheduler as module
from gxpo_services.scheduling.launcher import JobStatus, kill_orphaned_trainer
from gxpo_services.scheduling.scheduler import RECONCILE_EVERY_S
from gxpo_trainer.runtime.locks import process_start

S = RunState


@pytest.mark.parametrize(
    ("request_", "outcome", "values", "state", "reason"),
    [
        (None, "succeeded", {"ended_by": "steps"}, S.SUCCEEDED, "steps_done"),
        (None, "succeeded", {"ended_by": "hours"}, S.SUCCEEDED, "budget_reached"),
        (None, "failed", {"reason": "diverged", "message": "NaN"}, S.FAILED, "diverged"),
        ("pause", "paused", {}, S.PAUSED, None),
        ("cancel", "cancelled", {}, S.CANCELLED, None),
        ("cancel", "succeeded", {"ended_by": "steps"}, S.SUCCEEDED, "steps_done"),
        ("pause", "failed", {"reason": "stalled", "message": "x", "recoverable": True}, S.PAUSED, None),
    ],
)
def test_the_outcome_on_disk_counts_when_the_service_never_received_it(
    cluster: Cluster, request_: Any, outcome: str, values: dict[str, Any], state: RunState, reason: str | None
) -> None:
    scheduler, run_id = cluster.supervising()
    if request_:
        cluster.request(run_id, request_)
    write_outcome(cluster.settings, run_id, 1, outcome, **values)
    cluster.ends(scheduler, f"{run_id}-1", "succeeded")
    run = cluster.get(run_id)
    assert (run.state, run.reason, run.lease_owner) == (state, reason, None)
    assert len(cluster.launcher.submitted) == 1


def test_a_run_is_recovered_so_often_and_then_fails(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising(max_recoveries=2)
    for launch in (1, 2):
        secret = cluster.get(run_id).run_token_sha256
        cluster.ends(scheduler, f"{run_id}-{launch}", "failed", "exit code 137")
        scheduler.tick()
        assert len(cluster.launcher.submitted) == min(launch + 1, 2), "the second launch in a row has to wait"
        cluster.clock.passes(PAUSE_S)
        scheduler.tick()
        run = cluster.get(run_id)
        assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, launch + 1, launch)
        assert (run.last_batch, run.heartbeat_at) == (0, None)
        assert run.run_token_sha256 != secret, "an older launch must be shut out"
        cluster.report(run_id)
    cluster.ends(scheduler, f"{run_id}-3", "failed", "exit code 137")
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, "lost_heartbeat")
    assert "3 consecutive jobs were lost without progress, and max_recoveries is 2" in run.detail
    assert "exit code 137" in run.detail
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("reported", [False, True])
def test_a_stalled_trainer_is_launched_again_and_counted_once(cluster: Cluster, reported: bool) -> None:
    """reported: the outcome is not on the disk, which was full."""
    scheduler, run_id = cluster.supervising(max_recoveries=1)
    message = "no progress for 60 s while checkpointing (timeouts.checkpointing_s = 60)"

    def fails(launch: int) -> None:
        values = {"reason": "stalled", "message": message, "recoverable": True}
        if reported:
            outcome = {"attempt": launch, "outcome": "failed", **values}
            send(cluster.database, f"{run_id} {scheduler._held[run_id].secret}", body(1, launch, outcome=outcome))
            with cluster.database.writing() as session:  # what a trainer calls its own events counts for nothing
                number = cluster.get(run_id).number
                events.record(session, number, "trainer", "launch_failed", "", launch=launch, reason="disk_full")
        else:
            write_outcome(cluster.settings, run_id, launch, "failed", **values)

    fails(1)
    cluster.ends(scheduler, f"{run_id}-1", "failed")
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert cluster.messages(run_id)[-1][1].endswith(f"stalled: {message}")
    cluster.report(run_id)
    fails(2)
    cluster.ends(scheduler, f"{run_id}-2", "failed")
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, "stalled")
    assert message in run.detail


def test_launches_that_never_report_are_ended_and_repeated_until_the_limit(cluster: Cluster) -> None:
    scheduler, run_id = cluster.scheduler(max_recoveries=1, start_s=60.0), cluster.add_run()
    scheduler.tick()
    for launch in (1, 2):
        assert cluster.get(run_id).launch == launch
        cluster.rounds(scheduler, 61.0)
        assert set(cluster.launcher.stopped()) == {f"{run_id}-{n}" for n in range(1, launch + 1)}
        cluster.ends(scheduler, f"{run_id}-{launch}", "stopped")
        scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason, run.launch) == (S.FAILED, "setup_failed", 2)
    assert "start_s" in run.detail


def test_silence_ends_a_trainer_but_not_while_the_api_is_away_or_no_scheduler_watches(cluster: Cluster) -> None:
    answers = [False]
    first, second = (cluster.scheduler(name, api_answers=lambda: answers[0]) for name in ("first", "second"))
    run_id = cluster.running(first)
    with capture_logs() as logged:
        for _ in range(20):
            cluster.clock.passes(cluster.settings.heartbeat_s / 2)
            first.tick()
        answers[0] = True
        cluster.rounds(first, cluster.settings.heartbeat_s - 1)
    assert [(entry["event"], entry.get("error")) for entry in logged if entry.get("what") == "API"] == [
        ("unavailable; retrying", "no answer at http://127.0.0.1:8000; silence of trainers does not count"),
        ("available again", None),
    ]
    cluster.clock.passes(10 * cluster.settings.heartbeat_s)
    second.tick()
    cluster.rounds(second, cluster.settings.heartbeat_s - 1)
    assert cluster.launcher.stopped() == [], "it has had no time to report yet"
    cluster.clock.passes(2)
    second.tick()
    assert cluster.launcher.stopped() == [f"{run_id}-1"]
    assert cluster.get(run_id).launch == 1, "no second trainer while the first may live"
    cluster.ends(second, f"{run_id}-1", "stopped")
    run = cluster.get(run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert "heartbeat_s" in cluster.messages(run_id)[-1][1]


def test_each_outage_of_the_api_is_logged(cluster: Cluster) -> None:
    scheduler = cluster.scheduler("first", api_answers=lambda: False)
    run_id = cluster.running(scheduler)
    with capture_logs() as logged:
        for _ in range(2):
            cluster.clock.passes(cluster.settings.heartbeat_s / 2)
            scheduler.tick()
            cluster.clock.passes(1)
            cluster.report(run_id)
            scheduler.tick()
    words = [entry["event"] for entry in logged if entry.get("what") == "API"]
    assert words == ["unavailable; retrying", "available again"] * 2


def test_cancel_gives_the_trainer_time_then_ends_its_job(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "cancel")
    cluster.clock.passes(cluster.settings.cancel_grace_s - 1)
    scheduler.tick()
    assert cluster.launcher.stopped() == []
    cluster.clock.passes(2)
    scheduler.tick()
    scheduler.tick()
    assert set(cluster.launcher.stopped()) == {f"{run_id}-1"}
    assert cluster.get(run_id).state == S.CANCELLING, "not before the job has ended"
    cluster.ends(scheduler, f"{run_id}-1", "stopped")
    run = cluster.get(run_id)
    assert (run.state, run.lease_owner, run.run_token_sha256) == (S.CANCELLED, None, None)
    assert [kind for kind, _ in cluster.messages(run_id)].count("stop") == 1


def test_a_run_that_is_cancelled_before_its_job_is_there_never_gets_one(cluster: Cluster) -> None:
    run_id = cluster.add_run()
    scheduler = cluster.scheduler(quota_cpus=8.0, quota_gpus=0.0)
    cluster.launcher.away = True
    scheduler.tick()
    assert cluster.get(run_id).state == S.STARTING
    cluster.request(run_id, "cancel")
    cluster.launcher.away = False
    scheduler.tick()
    assert cluster.get(run_id).state == S.CANCELLED
    assert cluster.launcher.submitted == []


def test_a_pause_that_takes_too_long_ends_at_the_last_checkpoint_and_can_be_resumed(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "pause")
    cluster.rounds(scheduler, cluster.settings.pause_grace_s + 1, reporting=run_id)
    assert cluster.launcher.stopped() == [f"{run_id}-1"]
    cluster.ends(scheduler, f"{run_id}-1", "stopped")
    paused = cluster.get(run_id)
    assert (paused.state, paused.lease_owner, paused.recoveries) == (S.PAUSED, None, 0)
    cluster.request(run_id, "resume")
    scheduler.tick()
    resumed = cluster.get(run_id)
    assert (resumed.state, resumed.launch, resumed.recoveries) == (S.STARTING, 2, 0)
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_a_resumed_run_waits_for_the_end_of_its_last_job(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "pause")
    cluster.move(run_id, S.PAUSED)  # the trainer reported, and is still ending
    cluster.request(run_id, "resume")
    scheduler.tick()
    assert len(cluster.launcher.submitted) == 1
    assert set(cluster.launcher.stopped()) == {f"{run_id}-1"}
    cluster.ends(scheduler, f"{run_id}-1", "stopped")
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_nothing_changes_while_the_launcher_is_away_and_a_lost_job_does_not_count(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(max_recoveries=0)
    run_id, waiting = cluster.running(scheduler), cluster.add_run()
    before = cluster.row(run_id)
    cluster.launcher.away = True
    for _ in range(100):
        cluster.clock.passes(cluster.settings.lease_s / 2)
        scheduler.tick()
    after = cluster.row(run_id)
    assert {key for key in before if before[key] != after[key]} == {"lease_expires_at"}
    assert after["lease_expires_at"] == cluster.clock.now + cluster.settings.lease_s
    assert cluster.get(waiting).state == S.QUEUED
    cluster.launcher.away = False
    cluster.launcher.jobs.clear()  # a new head knows nothing
    scheduler.tick()
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 0)
    assert f"{run_id}-2" in cluster.launcher.jobs
    assert cluster.get(waiting).state == S.STARTING


@pytest.mark.parametrize(("max_forgotten", "reached"), [(2, [0, 0, 0]), (2, [4, 3, 4]), (0, [0]), (1, [1, 2, 2])])
def test_a_run_whose_jobs_are_often_forgotten_fails(cluster: Cluster, max_forgotten: int, reached: list[int]) -> None:
    """reached: the step at which Ray's head dies, launch by launch; the last time is once too often."""
    scheduler, run_id = cluster.supervising(max_recoveries=0, max_forgotten=max_forgotten)
    for launch, step in enumerate(reached, 1):
        assert (cluster.get(run_id).state, cluster.get(run_id).launch) == (S.RUNNING, launch)
        cluster.change(run_id, step=step)
        cluster.launcher.jobs.clear()
        scheduler.tick()
        cluster.clock.passes(PAUSE_S)
        scheduler.tick()
        if launch < len(reached):
            cluster.report(run_id)
    run = cluster.get(run_id)
    assert (run.state, run.reason, run.launch, run.recoveries) == (S.FAILED, "lost_heartbeat", len(reached), 0)
    assert f"{max_forgotten + 1} consecutive jobs were lost without progress" in run.detail
    assert f"max_forgotten is {max_forgotten}" in run.detail
    losses = [message for kind, message in cluster.messages(run_id) if kind == "job_forgotten"]
    assert losses == [
        f"job {run_id}-{launch} was lost at step {step}: the launcher no longer knows its job"
        for launch, step in enumerate(reached, 1)
    ]


def test_what_a_trainer_calls_its_events_counts_for_nothing(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising(max_forgotten=1)
    with cluster.database.writing() as session:
        for _ in range(3):
            events.record(session, cluster.get(run_id).number, "trainer", "job_forgotten", "lost", step="x")
    cluster.launcher.jobs.clear()
    scheduler.tick()
    assert cluster.get(run_id).state == S.RECOVERING


def test_the_jobs_of_all_runs_are_one_request_of_a_round(cluster: Cluster) -> None:
    scheduler = cluster.scheduler()
    run_ids = [cluster.running(scheduler) for _ in range(5)]
    cluster.launcher.calls.clear()
    scheduler.tick()
    assert cluster.launcher.calls == [("statuses", "")]
    missing = cluster.launcher.jobs.pop(f"{run_ids[0]}-1")
    cluster.launcher.after = lambda verb, _: cluster.launcher.jobs.update({f"{run_ids[0]}-1": missing})
    cluster.launcher.calls.clear()
    scheduler.tick()
    assert cluster.launcher.calls == [("statuses", ""), ("status", f"{run_ids[0]}-1")]
    assert cluster.get(run_ids[0]).state == S.RUNNING, "its job was submitted after the statuses were read"


def test_a_job_without_a_run_is_found_after_a_restart_of_the_scheduler_and_ended(cluster: Cluster) -> None:
    """The first scheduler is killed between the end of a run and the end of its job; an older launch hangs as well."""
    first = cluster.scheduler("first")
    ended, alive = cluster.running(first), cluster.running(first)
    deleted = f"{new_id('r')}-3"
    cluster.launcher.jobs[deleted] = JobStatus("running")
    cluster.change(ended, state=S.FAILED, lease_owner=None)
    second = cluster.scheduler("second")
    second.tick()
    assert cluster.launcher.stopped() == [], "its trainer may be sending its last lines"
    cluster.clock.passes(cluster.settings.cancel_grace_s + 1)
    cluster.report(alive)
    second.tick()
    assert sorted(cluster.launcher.stopped()) == sorted([f"{ended}-1", deleted])
    cluster.clock.passes(RECONCILE_EVERY_S)
    cluster.report(alive)
    cluster.launcher.ends(deleted, "stopped")
    cluster.launcher.ends(f"{ended}-1", "stopped")
    cluster.launcher.calls.clear()
    second.tick()
    assert cluster.launcher.stopped() == []
    assert cluster.get(alive).state == S.RUNNING


def test_ended_jobs_of_runs_that_are_over_are_deleted_some_at_a_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOBS_KEPT", 1)
    monkeypatch.setattr(module, "JOBS_AT_ONCE", 2)
    scheduler, run_id = cluster.supervising()
    cluster.ends(scheduler, f"{run_id}-1", "failed", "exit code 137")
    scheduler.tick()
    others = sorted(f"{new_id('r')}-1" for _ in range(4))
    for job_id in others:
        cluster.launcher.ends(job_id, "succeeded")
    left = []
    for _ in range(3):
        cluster.clock.passes(RECONCILE_EVERY_S)
        cluster.report(run_id)
        scheduler.tick()
        left.append(set(cluster.launcher.jobs))
    mine = {f"{run_id}-1", f"{run_id}-2"}
    assert left == [{*mine, *others[2:]}, {*mine, others[3]}, {*mine, others[3]}]


@contextmanager
def holder_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder's lock as a trainer does."""
    code = (
        "import sys, pathlib, time; from gxpo_trainer.runtime.locks import RunLock; "
        "lock = RunLock(pathlib.Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_trainer_that_the_launcher_lost_is_killed_before_the_next_one_starts(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    with holder_of(cluster.settings.artifacts / run_id) as orphan:
        cluster.launcher.jobs.clear()
        scheduler.tick()
        assert orphan.wait(timeout=30) == -9
        assert len(cluster.launcher.submitted) == 1
        scheduler.tick()
        scheduler.tick()
        assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_only_the_trainer_of_the_folder_is_killed(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    with holder_of(other) as stranger:
        pid, start = stranger.pid, process_start(stranger.pid)
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for line in (f"{pid} {start}\n", f"{pid} {start + 1}\n", f"{2**22 + 1} 5\n", "", "x y\n"):
                (folder / ".lock").write_text(line)
                assert not kill_orphaned_trainer(folder), line
        (folder / ".lock").write_text(f"{pid} {start}\n")
        assert not kill_orphaned_trainer(folder), "nobody holds the lock"
        assert not kill_orphaned_trainer(tmp_path / "none")
        assert stranger.poll() is None


def test_a_lease_is_renewed_when_a_third_of_it_has_passed(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(lease_s=30.0)
    run_id = cluster.running(scheduler)
    expires_at = []
    for _ in range(4):
        cluster.clock.passes(4.0)
        scheduler.tick()
        expires_at.append(cluster.get(run_id).lease_expires_at - cluster.clock.now)
    assert expires_at == [26.0, 22.0, 30.0, 26.0]


def test_renewing_leases_waits_for_no_other_transaction(cluster: Cluster) -> None:
    if cluster.database.is_sqlite:
        pytest.skip("SQLite locks no rows")
    scheduler = cluster.scheduler(lease_s=30.0)
    locked, other = (cluster.running(scheduler) for _ in range(2))
    cluster.clock.passes(12.0)
    with cluster.database.writing() as change:
        change.execute(select(Run.number).where(Run.id == locked).with_for_update())
        scheduler.tick()
    left = {run_id: cluster.get(run_id).lease_expires_at - cluster.clock.now for run_id in (locked, other)}
    assert left == {locked: 18.0, other: 30.0}
    scheduler.tick()
    assert cluster.get(locked).lease_expires_at - cluster.clock.now == 30.0
