"""Cancel, pause and resume requests carried out by the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from support import queued_runs as runs
from support.scheduling import Clock, Make
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings

S = RunState


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
    runs.request(database, run_id, "cancel", at=clock.now)
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
    runs.request(database, run_id, "cancel", at=clock.now)
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
    runs.request(database, run_id, "pause", at=clock.now)
    clock.passes(settings.pause_grace_s + 1)
    runs.report(database, run_id, at=clock.now)
    scheduler.tick()
    assert launcher.stopped() == [f"{run_id}-1"]
    launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    paused = runs.get(database, run_id)
    assert (paused.state, paused.lease_owner, paused.recoveries) == (S.PAUSED, None, 0)
    runs.request(database, run_id, "resume", at=clock.now)
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
    runs.request(database, run_id, "pause", at=clock.now)
    runs.move(database, run_id, S.PAUSED)  # the trainer reported, and is still ending
    runs.request(database, run_id, "resume", at=clock.now)
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
    assert len(launcher.calls) == calls, "it is not polled any more"
