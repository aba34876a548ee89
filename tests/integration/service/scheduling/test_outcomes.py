"""How the scheduler reads the end of a run, and recovers it."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduling import PAUSE_S, Cluster

from gxpo_services.run_states import RunState

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
    cluster: Cluster, request_: Any, outcome: str, values: dict[str, Any], state: RunState, reason: str | None
) -> None:
    scheduler, run_id = cluster.supervising()
    if request_:
        cluster.request(run_id, request_)
    cluster.write_outcome(run_id, 1, outcome, **values)
    cluster.launcher.ends(f"{run_id}-1", "succeeded")
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason, run.lease_owner) == (state, reason, None)
    assert len(cluster.launcher.submitted) == 1


def test_a_run_is_recovered_so_often_and_then_fails(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising(max_recoveries=2)
    for launch in (1, 2):
        secret = cluster.get(run_id).run_token_sha256
        cluster.launcher.ends(f"{run_id}-{launch}", "failed", "exit code 137")
        scheduler.tick()
        scheduler.tick()
        assert len(cluster.launcher.submitted) == min(launch + 1, 2), "the second launch in a row has to wait"
        cluster.clock.passes(PAUSE_S)
        scheduler.tick()
        run = cluster.get(run_id)
        assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, launch + 1, launch)
        assert (run.last_batch, run.heartbeat_at) == (0, None)
        assert run.run_token_sha256 != secret, "an older launch must be shut out"
        cluster.report(run_id)
    cluster.launcher.ends(f"{run_id}-3", "failed", "exit code 137")
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, "lost_heartbeat")
    assert "3 consecutive jobs were lost without progress, and max_recoveries is 2" in run.detail
    assert "exit code 137" in run.detail
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-{n}" for n in (1, 2, 3)]


def test_a_stalled_trainer_is_launched_again_and_counted_once(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising(max_recoveries=1)
    message = "no progress for 60 s while checkpointing (timeouts.checkpointing_s = 60)"
    cluster.write_outcome(run_id, 1, "failed", reason="stalled", message=message, recoverable=True)
    cluster.launcher.ends(f"{run_id}-1", "failed")
    scheduler.tick()
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert cluster.messages(run_id)[-1][1].endswith(f"stalled: {message}")
    cluster.report(run_id)
    cluster.write_outcome(run_id, 2, "failed", reason="stalled", message=message, recoverable=True)
    cluster.launcher.ends(f"{run_id}-2", "failed")
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, "stalled")
    assert message in run.detail


def test_a_pause_of_a_trainer_that_stalls_is_fulfilled(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "pause")
    cluster.write_outcome(run_id, 1, "failed", reason="stalled", message="x", recoverable=True)
    cluster.launcher.ends(f"{run_id}-1", "failed")
    scheduler.tick()
    assert cluster.get(run_id).state == S.PAUSED


def test_launches_that_never_report_are_ended_and_repeated_until_the_limit(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(max_recoveries=1)
    cluster.launcher.stops_at_once = True
    run_id = cluster.add_run()
    scheduler.tick()
    for _ in range(2):
        assert cluster.launcher.jobs[cluster.get(run_id).job_id or ""].is_alive
        cluster.rounds(scheduler, cluster.settings.start_s + 1)
        for _ in range(3):
            scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason, run.launch) == (S.FAILED, "setup_failed", 2)
    assert "start_s" in run.detail


def test_a_silent_trainer_is_ended_and_its_run_recovered(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.rounds(scheduler, cluster.settings.heartbeat_s - 1)
    assert cluster.launcher.stopped() == []
    cluster.clock.passes(2)
    scheduler.tick()
    assert cluster.launcher.stopped() == [f"{run_id}-1"]
    assert cluster.get(run_id).launch == 1, "no second trainer while the first may live"
    cluster.launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.launch, run.recoveries) == (S.RECOVERING, 2, 1)
    assert "heartbeat_s" in cluster.messages(run_id)[-1][1]


def test_silence_while_the_api_is_away_is_not_the_trainers_fault(cluster: Cluster) -> None:
    answers = [False]
    scheduler = cluster.scheduler(api_answers=lambda: answers[0])
    cluster.running(scheduler)
    for _ in range(20):
        cluster.clock.passes(cluster.settings.heartbeat_s / 2)
        scheduler.tick()
    answers[0] = True
    cluster.rounds(scheduler, cluster.settings.heartbeat_s - 1)
    assert cluster.launcher.stopped() == [], "it has had no time to report yet"
    cluster.clock.passes(2)
    scheduler.tick()
    assert len(cluster.launcher.stopped()) == 1


def test_silence_while_no_scheduler_watched_is_not_the_trainers_fault(cluster: Cluster) -> None:
    cluster.running(cluster.scheduler("first"))
    cluster.clock.passes(10 * cluster.settings.heartbeat_s)
    second = cluster.scheduler("second")
    second.tick()
    assert cluster.launcher.stopped() == []
    for _ in range(13):
        cluster.clock.passes(cluster.settings.heartbeat_s / 12)
        second.tick()
    assert len(set(cluster.launcher.stopped())) == 1
