"""How the scheduler reads the end of a run, and recovers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import queued_runs as runs
from support.scheduling import PAUSE_S, Clock, Make, write_outcome
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings

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
    ],
)
def test_the_outcome_on_disk_counts_when_the_service_never_received_it(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
    request_: Any,
    outcome: str,
    values: dict[str, Any],
    state: RunState,
    reason: str | None,
) -> None:
    scheduler = scheduler_of()
    run_id = running(scheduler)
    if request_:
        runs.request(database, run_id, request_, at=clock.now)
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
        assert len(launcher.submitted) == min(launch + 1, 2), "the second launch in a row has to wait"
        clock.passes(PAUSE_S)
        scheduler.tick()
        run = runs.get(database, run_id)
        assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, launch + 1, launch)
        assert (run.last_batch, run.heartbeat_at) == (0, None)
        assert run.run_token_sha256 != secret, "an older launch must be shut out"
        runs.report(database, run_id, at=clock.now)
    launcher.ends(f"{run_id}-3", "failed", "exit code 137")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, "lost_heartbeat")
    assert "3 consecutive jobs were lost without progress, and max_recoveries is 2" in run.detail
    assert "exit code 137" in run.detail
    assert [job.id for job in launcher.submitted] == [f"{run_id}-{n}" for n in (1, 2, 3)]


def test_a_run_that_makes_progress_is_recovered_for_as_long_as_it_does(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock, running: Callable[..., str]
) -> None:
    """A run of weeks on machines that come and go loses its job often."""
    scheduler = scheduler_of(max_recoveries=1)
    run_id = running(scheduler)
    for launch in range(1, 6):
        runs.change(database, run_id, step=10 * launch)
        launcher.ends(f"{run_id}-{launch}", "failed")
        scheduler.tick()
        scheduler.tick()
        runs.report(database, run_id, at=clock.now)
    run = runs.get(database, run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RUNNING, 6, 5)
    lost = [message for kind, message in runs.messages(database, run_id) if kind == "job_lost"]
    assert [message.partition(":")[0] for message in lost] == [
        f"job {run_id}-{launch} was lost at step {10 * launch}" for launch in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("reported", "message", "reason"),
    [
        (False, "exit code 1", "setup_failed"),
        (True, "exit code 1", "lost_heartbeat"),
        (True, "ray.exceptions.OutOfMemoryError: the node ran out of memory", "out_of_memory"),
    ],
)
def test_the_reason_names_the_failure(
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
        runs.report(database, run_id, at=clock.now)
    launcher.ends(f"{run_id}-1", "failed", message)
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, reason)


def test_a_stalled_trainer_is_launched_again_and_counted_once(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    scheduler = scheduler_of(max_recoveries=1)
    run_id = running(scheduler)
    message = "no progress for 60 s while checkpointing (timeouts.checkpointing_s = 60)"
    write_outcome(settings, run_id, 1, "failed", reason="stalled", message=message, recoverable=True)
    launcher.ends(f"{run_id}-1", "failed")
    scheduler.tick()
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert runs.messages(database, run_id)[-1][1].endswith(f"stalled: {message}")
    runs.report(database, run_id, at=clock.now)
    write_outcome(settings, run_id, 2, "failed", reason="stalled", message=message, recoverable=True)
    launcher.ends(f"{run_id}-2", "failed")
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, "stalled")
    assert message in run.detail


def test_a_pause_of_a_trainer_that_stalls_is_fulfilled(
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
    write_outcome(settings, run_id, 1, "failed", reason="stalled", message="x", recoverable=True)
    launcher.ends(f"{run_id}-1", "failed")
    scheduler.tick()
    assert runs.get(database, run_id).state == S.PAUSED


def test_launches_that_never_report_are_ended_and_repeated_until_the_limit(
    database: Database, settings: ServiceSettings, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    scheduler = scheduler_of(max_recoveries=1)
    launcher.stops_at_once = True
    run_id = runs.add_run(database)
    scheduler.tick()
    for _ in range(2):
        assert launcher.jobs[runs.get(database, run_id).job_id or ""].is_alive
        clock.rounds(scheduler, settings.start_s + 1)
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
    clock.rounds(scheduler, settings.heartbeat_s - 1)
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
    clock.rounds(scheduler, settings.heartbeat_s - 1)
    assert launcher.stopped() == [], "it has had no time to report yet"
    clock.passes(2)
    scheduler.tick()
    assert len(launcher.stopped()) == 1


def test_silence_while_the_only_scheduler_was_suspended_is_not_the_trainers_fault(
    database: Database,
    settings: ServiceSettings,
    launcher: ScriptedLauncher,
    scheduler_of: Make,
    clock: Clock,
    running: Callable[[Scheduler], str],
) -> None:
    """As after an outage of the database, which ends every round at the renewal of leases."""
    scheduler = scheduler_of()
    run_id, starting = running(scheduler), runs.add_run(database)
    scheduler.tick()
    clock.passes(settings.start_s + 1)
    scheduler.tick()
    clock.rounds(scheduler, settings.heartbeat_s - 1)
    assert launcher.stopped() == [], "neither has had time to report"
    clock.passes(2)
    scheduler.tick()
    assert launcher.stopped() == [f"{run_id}-1"]
    clock.rounds(scheduler, settings.start_s - settings.heartbeat_s)
    assert set(launcher.stopped()) == {f"{run_id}-1", f"{starting}-1"}


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
