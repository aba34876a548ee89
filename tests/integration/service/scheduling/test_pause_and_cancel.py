"""Cancel, pause and resume requests carried out by the scheduler."""

from __future__ import annotations

from support.scheduling import Cluster

from gxpo_services.run_states import RunState

S = RunState


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
    cluster.launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
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
    cluster.launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
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
    cluster.launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1", f"{run_id}-2"]


def test_a_job_that_outlives_its_run_is_ended(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.move(run_id, S.SUCCEEDED)
    scheduler.tick()
    assert cluster.launcher.stopped() == []
    cluster.clock.passes(cluster.settings.cancel_grace_s + 1)
    scheduler.tick()
    assert cluster.launcher.stopped() == [f"{run_id}-1"]
    cluster.launcher.ends(f"{run_id}-1", "stopped")
    scheduler.tick()
    calls = len(cluster.launcher.calls)
    scheduler.tick()
    assert len(cluster.launcher.calls) == calls, "it is not polled any more"
