"""A clock that is set back by an hour: times that were stored before it are in the future and say nothing. One that is
set forward: no time has passed."""

from __future__ import annotations

from support.scheduling import PAUSE_S, Cluster

from gxpo_services.scheduling.launcher import JobRefused, JobStatus
from gxpo_services.scheduling.scheduler import RECONCILE_EVERY_S

BACK_S = -3600.0


def test_a_lease_from_before_is_taken_over_and_one_that_is_a_little_ahead_is_not(cluster: Cluster) -> None:
    run_id = cluster.running(cluster.scheduler("first"))
    for seconds, owner in ((-cluster.settings.lease_s / 2, "first"), (BACK_S, "second")):
        cluster.clock.passes(seconds)
        cluster.scheduler("second").tick()
        assert cluster.get(run_id).lease_owner == owner


def test_silence_is_noticed_as_before(cluster: Cluster) -> None:
    scheduler = cluster.scheduler()
    run_id, starting = cluster.running(scheduler), cluster.add_run()
    scheduler.tick()
    cluster.clock.passes(BACK_S)
    scheduler.tick()
    cluster.rounds(scheduler, cluster.settings.heartbeat_s - 1)
    assert cluster.launcher.stopped() == [], "they have had no time to report"
    cluster.clock.passes(2)
    scheduler.tick()
    assert cluster.launcher.stopped() == [f"{run_id}-1"]
    cluster.rounds(scheduler, cluster.settings.start_s - cluster.settings.heartbeat_s)
    assert set(cluster.launcher.stopped()) == {f"{run_id}-1", f"{starting}-1"}


def test_a_cancel_request_from_before_ends_its_job(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "cancel")
    scheduler.tick()
    cluster.clock.passes(BACK_S)
    scheduler.tick()
    cluster.rounds(scheduler, cluster.settings.cancel_grace_s + 1, reporting=run_id)  # its trainer does not stop
    assert cluster.launcher.stopped() == [f"{run_id}-1"]


def test_a_launch_waits_no_longer_than_its_pause(cluster: Cluster) -> None:
    scheduler, run_id = cluster.supervising(max_recoveries=5)
    for _ in range(3):
        cluster.launcher.ends(f"{run_id}-{cluster.get(run_id).launch}", "failed")
        scheduler.tick()
    cluster.clock.passes(BACK_S)
    scheduler.tick()
    cluster.clock.passes(PAUSE_S)
    scheduler.tick()
    assert f"{run_id}-4" in cluster.launcher.jobs


def test_orphaned_jobs_are_found_as_often(cluster: Cluster) -> None:
    scheduler = cluster.scheduler()
    scheduler.tick()
    cluster.clock.passes(BACK_S)
    cluster.launcher.jobs["orphan"] = JobStatus("running")
    for seconds in (RECONCILE_EVERY_S, cluster.settings.cancel_grace_s + 1):
        cluster.clock.passes(seconds)
        scheduler.tick()
    assert cluster.launcher.stopped() == ["orphan"]


def test_a_clock_that_is_set_forward_uses_up_no_grace(cluster: Cluster) -> None:
    """The job of the second run is refused, so that it has not started."""

    def refuse(verb: str, job_id: str) -> None:
        if verb == "submit":
            raise JobRefused("busy")

    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "pause")
    cluster.launcher.before = refuse
    starting = cluster.add_run()
    scheduler.tick()
    cluster.clock.passes(-BACK_S)
    scheduler.tick()
    assert cluster.launcher.stopped() == []
    assert cluster.get(starting).launch == 1
    cluster.launcher.before = lambda verb, job_id: None
    cluster.rounds(scheduler, cluster.settings.pause_grace_s + 1, reporting=run_id)
    assert f"{run_id}-1" in cluster.launcher.stopped()
