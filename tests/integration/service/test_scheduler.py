"""The scheduler against a launcher that does what the test says, on both databases."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import queued_runs as runs
from support.scripted_launcher import Crash, ScriptedLauncher
from support.service_processes import until

from gxpo_services import run_folder
from gxpo_services.auth import same_hash
from gxpo_services.db import Database
from gxpo_services.runs import events
from gxpo_services.runs.states import RunState
from gxpo_services.scheduler import MISFIT_S, Scheduler
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config_io import load_run
from gxpo_trainer.run_lock import process_start

S = RunState


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def launcher() -> ScriptedLauncher:
    return ScriptedLauncher()


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"max_concurrent_runs": 100})


Make = Callable[..., Scheduler]


@pytest.fixture
def scheduler_of(database: Database, settings: ServiceSettings, launcher: ScriptedLauncher, clock: Clock) -> Make:
    def make(owner: str = "first", **changes: Any) -> Scheduler:
        answers = changes.pop("api_answers", lambda: True)
        with_changes = settings.model_copy(update=changes)
        return Scheduler(database, with_changes, launcher, owner=owner, api_answers=answers, clock=clock)

    return make


@pytest.fixture
def running(database: Database, launcher: ScriptedLauncher, clock: Clock) -> Callable[[Scheduler], str]:
    """A run whose trainer has reported once."""

    def make(scheduler: Scheduler, **values: Any) -> str:
        run_id = runs.add_run(database, **values)
        scheduler.tick()
        runs.heard(database, run_id, at=clock.now)
        return run_id

    return make


def write_outcome(settings: ServiceSettings, run_id: str, attempt: int, outcome: str, **values: Any) -> None:
    body = {"attempt": attempt, "outcome": outcome, "ended_by": None, "reason": None, "message": "", "time": 1.0}
    (settings.artifacts / run_id / "outcome.json").write_text(json.dumps(body | values))


# ---- launches --------------------------------------------------------------------------------------------------


def test_a_queued_run_is_launched_with_its_config_and_a_secret(
    database: Database, settings: ServiceSettings, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    config = RunConfig.model_validate({"seed": 7, "budget": {"steps": 3}})
    run_id = runs.add_run(database, config=config.model_dump(mode="json"))
    scheduler_of().tick()
    run, folder = runs.get(database, run_id), settings.artifacts / run_id
    assert (run.state, run.launch, run.job_id, run.lease_owner) == (S.STARTING, 1, f"{run_id}-1", "first")
    assert load_run(folder / "config.toml") == config
    service = json.loads((folder / "service.json").read_text())
    assert service == {"url": settings.api_url, "run": run_id, "attempt": 1, "token": service["token"]}
    assert same_hash(service["token"], run.run_token_sha256)
    assert stat.S_IMODE((folder / "service.json").stat().st_mode) == 0o600
    (job,) = launcher.submitted
    assert job.id == run.job_id
    assert job.command[1:4] == ("-m", "gxpo_trainer.cli", "train")
    assert service["token"] not in job.entrypoint


@pytest.mark.parametrize("point", ["status", "prepare", "before submit", "after submit"])
def test_a_crash_at_any_point_of_a_launch_is_healed_by_the_next_scheduler(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    def crash(verb: str, job_id: str) -> None:
        if verb == point.split()[-1]:
            raise Crash

    def crash_in_prepare(*_: Any, **__: Any) -> None:
        raise Crash

    run_id = runs.add_run(database)
    if point == "after submit":
        launcher.after = crash
    elif point == "prepare":
        monkeypatch.setattr(run_folder, "prepare", crash_in_prepare)
    else:
        launcher.before = crash
    with pytest.raises(Crash):
        scheduler_of("first").tick()
    monkeypatch.undo()
    launcher.before = launcher.after = lambda verb, job_id: None
    assert runs.get(database, run_id).state == S.STARTING

    second = scheduler_of("second")
    second.tick()
    assert len(launcher.submitted) == (1 if point == "after submit" else 0), "the lease of the first still runs"
    clock.passes(settings.lease_s + 1)
    second.tick()
    second.tick()
    run = runs.get(database, run_id)
    assert [job.id for job in launcher.submitted] == [f"{run_id}-1"]
    assert (run.state, run.launch, run.lease_owner, run.lease_token) == (S.STARTING, 1, "second", 2)
    service = json.loads((settings.artifacts / run_id / "service.json").read_text())
    assert same_hash(service["token"], run.run_token_sha256), "the trainer's secret must be the one that is checked"


def test_a_job_that_runs_is_adopted_with_its_secret(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    run_id = running(scheduler_of("first"))
    before = runs.get(database, run_id)
    clock.passes(settings.lease_s + 1)
    scheduler_of("second").tick()
    after = runs.get(database, run_id)
    assert (after.state, after.launch, after.lease_owner) == (S.RUNNING, 1, "second")
    assert after.run_token_sha256 == before.run_token_sha256
    assert len(launcher.submitted) == 1


def test_a_clean_end_lets_go_of_the_leases(database: Database, scheduler_of: Make) -> None:
    run_id = runs.add_run(database)
    first, stop = scheduler_of("first"), threading.Event()
    first.tick()
    stop.set()
    first.run_forever(stop)
    assert runs.get(database, run_id).lease_owner is None
    scheduler_of("second").tick()
    assert runs.get(database, run_id).lease_owner == "second", "nobody has to wait for a lease that was let go"


def test_a_config_that_cannot_be_used_any_more_fails_the_run(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    run_id = runs.add_run(database, config={"seed": "seven"})
    scheduler_of().tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, "invalid_config")
    assert "seed" in run.detail
    assert launcher.submitted == []


def test_a_folder_that_cannot_be_made_fails_the_run(
    database: Database, scheduler_of: Make, tmp_path: Path, launcher: ScriptedLauncher
) -> None:
    (tmp_path / "file").write_text("")
    run_id = runs.add_run(database)
    scheduler_of(artifact_root=tmp_path / "file").tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, "setup_failed")
    assert launcher.submitted == []


# ---- leases ----------------------------------------------------------------------------------------------------


def test_a_scheduler_that_comes_back_late_changes_nothing(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    first, second = scheduler_of("first"), scheduler_of("second")
    run_id = running(first)
    clock.passes(settings.lease_s + 1)
    second.tick()
    launcher.ends(f"{run_id}-1", "failed")
    before, said = runs.row(database, run_id), runs.messages(database, run_id)
    calls = len(launcher.calls)
    first.tick()
    assert runs.row(database, run_id) == before
    assert runs.messages(database, run_id) == said
    assert launcher.calls[calls:] == [], "not its job any more"


@pytest.mark.parametrize("state", [S.RUNNING, S.CANCELLING, S.PAUSING])
def test_a_scheduler_that_loses_its_lease_in_the_middle_of_a_round_changes_nothing(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
    state: RunState,
) -> None:
    first, second = scheduler_of("first"), scheduler_of("second")
    run_id = running(first)
    if state != S.RUNNING:
        runs.wish(database, run_id, "cancel" if state == S.CANCELLING else "pause", at=clock.now)
    launcher.ends(f"{run_id}-1", "failed")
    seen: list[dict[str, Any]] = []

    def taken_over(verb: str, job_id: str) -> None:
        launcher.before = lambda verb, job_id: None
        launcher.jobs[job_id] = runs_still = type(launcher.jobs[job_id])("running")
        clock.passes(settings.lease_s + 1)
        second.tick()
        assert runs_still.is_alive
        launcher.ends(job_id, "failed")
        seen.append(runs.row(database, run_id))

    launcher.before = taken_over
    first.tick()
    (before,) = seen
    assert before["lease_owner"] == "second"
    assert runs.row(database, run_id) == before


def test_two_schedulers_at_once_launch_each_run_once_and_keep_the_quota(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    ids = [runs.add_run(database) for _ in range(12)]
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    def work(scheduler: Scheduler) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                scheduler.tick()
        except BaseException as error:  # it must reach the test
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(scheduler_of(owner, max_concurrent_runs=7),)) for owner in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    states = [runs.get(database, run_id) for run_id in ids]
    assert sum(run.state == S.STARTING for run in states) == 7
    assert sum(run.state == S.QUEUED for run in states) == 5
    assert all(run.launch == (run.state == S.STARTING) for run in states)
    assert len(launcher.submitted) == 7


# ---- wishes ----------------------------------------------------------------------------------------------------


def test_cancel_gives_the_trainer_time_then_ends_its_job(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    runs.wish(database, run_id, "cancel", at=clock.now)
    clock.passes(settings.cancel_grace_s - 1)
    scheduler.tick()
    assert launcher.stopped() == []
    clock.passes(2)
    scheduler.tick()
    scheduler.tick()
    assert set(launcher.stopped()) == {f"{run_id}-1"}
    assert runs.get(database, run_id).state == S.CANCELLING, "not before the job has ended"
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.lease_owner, run.run_token_sha256) == (S.CANCELLED, None, None)
    assert [kind for kind, _ in runs.messages(database, run_id)].count("stop") == 1


def test_a_run_that_is_cancelled_before_its_job_is_there_never_gets_one(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    run_id = runs.add_run(database)
    scheduler = scheduler_of(quota_cpus=8.0, quota_gpus=0.0)
    launcher.away = True
    scheduler.tick()
    assert runs.get(database, run_id).state == S.STARTING
    runs.wish(database, run_id, "cancel", at=clock.now)
    launcher.away = False
    scheduler.tick()
    assert runs.get(database, run_id).state == S.CANCELLED
    assert launcher.submitted == []


def test_a_pause_that_takes_too_long_ends_at_the_last_checkpoint_and_can_be_resumed(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    runs.wish(database, run_id, "pause", at=clock.now)
    clock.passes(settings.pause_grace_s + 1)
    runs.heard(database, run_id, at=clock.now)
    scheduler.tick()
    assert launcher.stopped() == [f"{run_id}-1"]
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    paused = runs.get(database, run_id)
    assert (paused.state, paused.lease_owner, paused.recoveries) == (S.PAUSED, None, 0)
    runs.wish(database, run_id, "resume", at=clock.now)
    scheduler.tick()
    resumed = runs.get(database, run_id)
    assert (resumed.state, resumed.launch, resumed.recoveries) == (S.STARTING, 2, 0)
    assert [job.id for job in launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_a_resumed_run_waits_for_the_end_of_its_last_job(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    runs.wish(database, run_id, "pause", at=clock.now)
    runs.move(database, run_id, S.PAUSED)  # the trainer reported, and is still ending
    runs.wish(database, run_id, "resume", at=clock.now)
    scheduler.tick()
    assert len(launcher.submitted) == 1
    assert set(launcher.stopped()) == {f"{run_id}-1"}
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    assert [job.id for job in launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_a_job_that_outlives_its_run_is_ended(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    runs.move(database, run_id, S.SUCCEEDED)
    scheduler.tick()
    assert launcher.stopped() == []
    clock.passes(settings.cancel_grace_s + 1)
    scheduler.tick()
    assert launcher.stopped() == [f"{run_id}-1"]
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    calls = len(launcher.calls)
    scheduler.tick()
    assert len(launcher.calls) == calls, "nobody asks for it any more"


# ---- outcomes and recovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "outcome", "values", "state", "reason"),
    [
        (None, "succeeded", {"ended_by": "steps"}, S.SUCCEEDED, "steps_done"),
        (None, "succeeded", {"ended_by": "hours"}, S.SUCCEEDED, "budget_reached"),
        (None, "failed", {"reason": "diverged", "message": "NaN"}, S.FAILED, "diverged"),
        ("pause", "paused", {}, S.PAUSED, None),
        ("cancel", "cancelled", {}, S.CANCELLED, None),
        ("cancel", "succeeded", {"ended_by": "steps"}, S.SUCCEEDED, "steps_done"),
    ],
)
def test_the_outcome_on_the_disk_counts_when_the_service_never_heard_it(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
    wish: Any,
    outcome: str,
    values: dict[str, Any],
    state: RunState,
    reason: str | None,
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    if wish:
        runs.wish(database, run_id, wish, at=clock.now)
    write_outcome(settings, run_id, 1, outcome, **values)
    launcher.ends(f"{run_id}-1", "succeeded")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason, run.lease_owner) == (state, reason, None)
    assert len(launcher.submitted) == 1


def test_an_outcome_of_an_earlier_launch_means_nothing(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    launcher.ends(f"{run_id}-1", "failed")
    scheduler.tick()
    write_outcome(settings, run_id, 1, "succeeded", ended_by="steps")
    scheduler.tick()
    launcher.ends(f"{run_id}-2", "failed")
    scheduler.tick()
    assert runs.get(database, run_id).state == S.RECOVERING


def test_a_run_is_recovered_so_often_and_then_fails(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock, running: Callable[..., str]
) -> None:
    scheduler = scheduler_of(max_recoveries=2)
    run_id = running(scheduler)
    for launch in (1, 2):
        secret = runs.get(database, run_id).run_token_sha256
        launcher.ends(f"{run_id}-{launch}", "failed", "exit code 137")
        scheduler.tick()
        scheduler.tick()
        run = runs.get(database, run_id)
        assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, launch + 1, launch)
        assert (run.last_batch, run.heartbeat_at) == (0, None)
        assert run.run_token_sha256 != secret, "an older launch must be shut out"
        runs.heard(database, run_id, at=clock.now)
    launcher.ends(f"{run_id}-3", "failed", "exit code 137")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, "lost_heartbeat")
    assert "recovered 2 times" in run.detail
    assert "exit code 137" in run.detail
    assert [job.id for job in launcher.submitted] == [f"{run_id}-{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("reported", "message", "reason"),
    [
        (False, "exit code 1", "setup_failed"),
        (True, "exit code 1", "lost_heartbeat"),
        (True, "ray.exceptions.OutOfMemoryError: the node ran out of memory", "out_of_memory"),
    ],
)
def test_the_reason_says_what_went_wrong(
    database: Database,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    reported: bool,
    message: str,
    reason: str,
) -> None:
    scheduler = scheduler_of(max_recoveries=0)
    run_id = runs.add_run(database)
    scheduler.tick()
    if reported:
        runs.heard(database, run_id, at=clock.now)
    launcher.ends(f"{run_id}-1", "failed", message)
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, reason)


def test_launches_that_never_report_are_ended_and_repeated_until_the_limit(
    database: Database, settings: ServiceSettings, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    scheduler = scheduler_of(max_recoveries=1)
    launcher.stops_at_once = True
    run_id = runs.add_run(database)
    scheduler.tick()
    for _ in range(2):
        assert launcher.jobs[runs.get(database, run_id).job_id or ""].is_alive
        clock.passes(settings.start_s + 1)
        for _ in range(3):
            scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason, run.launch) == (S.FAILED, "setup_failed", 2)
    assert "start_s" in run.detail


def test_a_silent_trainer_is_ended_and_its_run_recovered(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    clock.passes(settings.heartbeat_s - 1)
    scheduler.tick()
    assert launcher.stopped() == []
    clock.passes(2)
    scheduler.tick()
    assert launcher.stopped() == [f"{run_id}-1"]
    assert runs.get(database, run_id).launch == 1, "no second trainer while the first may live"
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert "heartbeat_s" in runs.messages(database, run_id)[-1][1]


def test_silence_while_the_api_is_away_is_not_the_trainers_fault(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    answers = [False]
    scheduler = scheduler_of(api_answers=lambda: answers[0])
    running(scheduler)
    for _ in range(20):
        clock.passes(settings.heartbeat_s / 2)
        scheduler.tick()
    answers[0] = True
    clock.passes(settings.heartbeat_s - 1)
    scheduler.tick()
    assert launcher.stopped() == [], "it has had no time to report yet"
    clock.passes(2)
    scheduler.tick()
    assert len(launcher.stopped()) == 1


def test_silence_while_no_scheduler_watched_is_not_the_trainers_fault(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    running(scheduler_of("first"))
    clock.passes(10 * settings.heartbeat_s)
    second = scheduler_of("second")
    second.tick()
    assert launcher.stopped() == []
    for _ in range(13):
        clock.passes(settings.heartbeat_s / 12)
        second.tick()
    assert len(set(launcher.stopped())) == 1


def test_nothing_changes_while_the_launcher_is_away_and_a_lost_job_does_not_count(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of(max_recoveries=0)
    run_id, waiting = running(scheduler), runs.add_run(database)
    before = runs.row(database, run_id)
    launcher.away = True
    for _ in range(100):
        clock.passes(settings.lease_s / 2)
        scheduler.tick()
    after = runs.row(database, run_id)
    assert {key for key in before if before[key] != after[key]} == {"lease_expires_at"}
    assert after["lease_expires_at"] == clock.now + settings.lease_s
    assert runs.get(database, waiting).state == S.QUEUED
    launcher.away = False
    launcher.jobs.clear()  # a new head knows nothing
    scheduler.tick()
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 0)
    assert f"{run_id}-2" in launcher.jobs
    assert runs.get(database, waiting).state == S.STARTING


@pytest.mark.parametrize(("max_forgotten", "reached"), [(2, [0, 0, 0]), (2, [4, 3, 4, 2]), (0, [0]), (1, [1, 2, 2, 2])])
def test_a_run_whose_jobs_are_forgotten_again_and_again_fails(
    database: Database,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[..., str],
    max_forgotten: int,
    reached: list[int],
) -> None:
    """reached: the step at which Ray's head dies, launch by launch; the last time is once too often."""
    scheduler = scheduler_of(max_recoveries=0, max_forgotten=max_forgotten)
    run_id = running(scheduler)
    for launch, step in enumerate(reached, 1):
        assert (runs.get(database, run_id).state, runs.get(database, run_id).launch) == (S.RUNNING, launch)
        runs.change(database, run_id, step=step)
        launcher.jobs.clear()
        scheduler.tick()
        scheduler.tick()
        if launch < len(reached):
            runs.heard(database, run_id, at=clock.now)
    run = runs.get(database, run_id)
    assert (run.state, run.reason, run.launch, run.recoveries) == (S.FAILED, "lost_heartbeat", len(reached), 0)
    assert f"{max_forgotten + 1} jobs in a row were lost so without a new step" in run.detail
    assert f"max_forgotten is {max_forgotten}" in run.detail
    losses = [message for kind, message in runs.messages(database, run_id) if kind == "job_forgotten"]
    assert losses == [
        f"job {run_id}-{launch} was lost at step {step}: the launcher no longer knows it"
        for launch, step in enumerate(reached, 1)
    ]


def test_new_steps_between_losses_keep_a_run_going(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock, running: Callable[..., str]
) -> None:
    scheduler = scheduler_of(max_recoveries=0, max_forgotten=1)
    run_id = running(scheduler)
    for step in (0, 1, 1, 2, 2, 3, 3, 4):
        runs.change(database, run_id, step=step)
        launcher.jobs.clear()
        scheduler.tick()
        scheduler.tick()
        runs.heard(database, run_id, at=clock.now)
    run = runs.get(database, run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RUNNING, 9, 0)


def test_what_a_trainer_calls_its_events_counts_for_nothing(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, running: Callable[..., str]
) -> None:
    scheduler = scheduler_of(max_forgotten=1)
    run_id = running(scheduler)
    with database.writing() as session:
        for _ in range(3):
            events.record(session, runs.get(database, run_id).number, "trainer", "job_forgotten", "lost", step="x")
    launcher.jobs.clear()
    scheduler.tick()
    assert runs.get(database, run_id).state == S.RECOVERING


def test_a_trainer_that_the_launcher_lost_is_killed_before_the_next_one_starts(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    folder = settings.artifacts / run_id
    orphan = holder_of(folder)
    try:
        launcher.jobs.clear()
        scheduler.tick()
        assert orphan.wait(timeout=30) == -9
        assert len(launcher.submitted) == 1
        scheduler.tick()
        scheduler.tick()
        assert [job.id for job in launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]
    finally:
        orphan.kill()
        orphan.wait()


def test_only_the_trainer_of_the_folder_is_killed(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    stranger = holder_of(other)
    try:
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        pid, start = stranger.pid, process_start(stranger.pid)
        for line in (f"{pid} {start}\n", f"{pid} {start + 1}\n", f"{2**22 + 1} 5\n", "", "x y\n"):
            os.ftruncate(lock, 0)
            os.pwrite(lock, line.encode(), 0)
            assert not run_folder.is_left(folder), line
        os.close(lock)
        (folder / ".lock").write_text(f"{pid} {start}\n")
        assert not run_folder.is_left(folder), "nobody holds the lock"
        assert not run_folder.is_left(tmp_path / "none")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def holder_of(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder's lock as a trainer does."""
    code = (
        "import sys, pathlib, time; from gxpo_trainer.run_lock import RunLock; "
        "lock = RunLock(pathlib.Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


# ---- the queue -------------------------------------------------------------------------------------------------


def test_the_queue_is_fair_and_keeps_to_the_quota(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    many = [runs.add_run(database, created_by_id="many", queued_at=float(n)) for n in range(4)]
    late = runs.add_run(database, created_by_id="other", queued_at=100.0)
    urgent = runs.add_run(database, created_by_id="many", queued_at=200.0, priority=1)
    scheduler = scheduler_of(max_concurrent_runs=2)
    begun: list[set[str]] = []
    for _ in range(5):
        scheduler.tick()
        begun.append({job.id.removesuffix("-1") for job in launcher.submitted} - set().union(*begun))
        executing = [run_id for run_id in [urgent, late, *many] if runs.get(database, run_id).state == S.STARTING]
        assert len(executing) <= 2
        runs.move(database, executing[0], S.FAILED)
    # The first two; then, as one ends each time, the submitter's other runs in the order in which they came.
    assert begun == [{urgent, late}, {many[0]}, {many[1]}, {many[2]}, {many[3]}]


def test_a_run_larger_than_the_cluster_fails_once_the_cluster_had_time_to_grow(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    launcher.capacity = (2.0, 0.0)
    scheduler = scheduler_of()
    too_large = runs.add_run(database, cpus=3.0)
    grows = runs.add_run(database, gpus=1.0)
    small = runs.add_run(database, cpus=2.0)
    scheduler.tick()
    assert runs.get(database, small).state == S.STARTING, "what cannot start holds up nobody"
    launcher.capacity = (2.0, 1.0)
    clock.passes(MISFIT_S / 2)
    scheduler.tick()
    assert runs.get(database, too_large).state == S.QUEUED
    clock.passes(MISFIT_S / 2)
    scheduler.tick()
    failed = runs.get(database, too_large)
    assert (failed.state, failed.reason, failed.lease_owner) == (S.FAILED, "no_resources", None)
    assert "3 CPUs" in failed.detail
    assert runs.get(database, grows).state == S.QUEUED


def test_a_quota_takes_the_place_of_the_clusters_size(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    first, second = (runs.add_run(database, cpus=1.5, queued_at=float(n)) for n in range(2))
    scheduler = scheduler_of(quota_cpus=2.0, quota_gpus=0.0)
    scheduler.tick()
    assert [job.id for job in launcher.submitted] == [f"{first}-1"]
    assert ("resources", "") not in launcher.calls
    assert runs.get(database, second).state == S.QUEUED


def test_one_run_that_cannot_be_advanced_does_not_stop_the_others(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make
) -> None:
    ids = sorted(runs.add_run(database) for _ in range(3))

    def broken(verb: str, job_id: str) -> None:
        if verb == "submit" and job_id.startswith(ids[1]):
            raise ValueError("odd")

    launcher.before = broken
    scheduler = scheduler_of()
    scheduler.tick()
    scheduler.tick()
    assert sorted(job.id for job in launcher.submitted) == [f"{ids[0]}-1", f"{ids[2]}-1"]
    launcher.before = lambda verb, job_id: None
    scheduler.tick()
    assert len(launcher.submitted) == 3


def test_the_process_ends_cleanly_when_it_is_told_to(database: Database, database_url: str, tmp_path: Path) -> None:
    run_id = runs.add_run(database, state=S.CANCELLING, launch=1, job_id="gone-1", wish_at=0.0)
    environment = {**os.environ, "GXPO_HOME": str(tmp_path / "home"), "GXPO_DATABASE_URL": database_url}
    command = [sys.executable, "-m", "gxpo_services.scheduler", "--launcher", "process"]
    process = subprocess.Popen(command, env=environment)
    try:
        until(lambda: runs.get(database, run_id).state == S.CANCELLED, "the run that nobody held to be taken over")
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    finally:
        process.kill()
        process.wait()


def test_a_bad_setting_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gxpo_services.scheduler"]
    environment = {**os.environ, "GXPO_HOME": str(tmp_path / "home"), "GXPO_LEASE_S": "-1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "GXPO_LEASE_S" in done.stderr
    assert "Traceback" not in done.stderr
