"""Launches and leases of the scheduler, on both databases."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.scheduling import PAUSE_S, Cluster, Crash

from gxpo_services.api.principals import hash_token
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import run_supervisor
from gxpo_services.scheduling.launcher import JobStatus
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_run

S = RunState


def test_a_queued_run_is_launched_with_its_config_a_secret_and_the_servers_lists(cluster: Cluster) -> None:
    config = RunConfig.model_validate({"seed": 7, "budget": {"steps": 3}})
    run_id = cluster.add_run(config=config.model_dump(mode="json"))
    lists: dict[str, Any] = {"allowed_plugins": ("lookahead", "e:F")}
    for kind in ("reward", "environment"):
        lists |= {f"allowed_{kind}s": ("a:B", kind), f"allowed_{kind}_urls": ("http://host:8100/", f"https://{kind}")}
    cluster.scheduler(**lists).tick()
    run, folder = cluster.get(run_id), cluster.settings.artifacts / run_id
    assert (run.state, run.launch, run.job_id, run.lease_owner) == (S.STARTING, 1, f"{run_id}-1", "first")
    assert load_run(folder / "config.toml") == config
    service = json.loads((folder / "service.json").read_text())
    about = {"url": cluster.settings.api_url, "run": run_id, "attempt": 1, "after": 0}
    assert service == about | {"token": service["token"]}
    assert hash_token(service["token"]) == run.run_token_sha256
    assert stat.S_IMODE((folder / "service.json").stat().st_mode) == 0o600
    (job,) = cluster.launcher.submitted
    assert job.id == run.job_id
    assert job.command[1:4] == ("-m", "gxpo_trainer.cli", "train")
    assert service["token"] not in job.entrypoint
    assert job.env["GXPO_PLUGIN_ALLOWLIST"] == "lookahead,e:F"
    for kind in ("reward", "environment"):
        assert job.env[f"GXPO_{kind.upper()}_ALLOWLIST"] == f"a:B,{kind}"
        assert job.env[f"GXPO_{kind.upper()}_URLS"] == f"http://host:8100/,https://{kind}"


@pytest.mark.parametrize("point", ["status", "prepare", "before submit", "after submit"])
def test_the_next_scheduler_heals_any_crash(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    def crash(verb: str, job_id: str) -> None:
        if verb == point.split()[-1]:
            raise Crash

    def crash_in_prepare(*_: Any, **__: Any) -> None:
        raise Crash

    run_id = cluster.add_run()
    if point == "prepare":
        monkeypatch.setattr(run_supervisor, "prepare", crash_in_prepare)
    else:
        setattr(cluster.launcher, "after" if point == "after submit" else "before", crash)
    with pytest.raises(Crash):
        cluster.scheduler("first").tick()
    monkeypatch.undo()
    cluster.launcher.before = cluster.launcher.after = lambda verb, job_id: None
    assert cluster.get(run_id).state == S.STARTING

    second = cluster.scheduler("second")
    second.tick()
    assert len(cluster.launcher.submitted) == (1 if point == "after submit" else 0), "the lease of the first still runs"
    cluster.clock.passes(cluster.settings.lease_s + 1)
    second.tick()
    second.tick()
    run = cluster.get(run_id)
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1"]
    assert (run.state, run.launch, run.lease_owner, run.lease_token) == (S.STARTING, 1, "second", 2)
    service = json.loads((cluster.settings.artifacts / run_id / "service.json").read_text())
    assert hash_token(service["token"]) == run.run_token_sha256, "the trainer's secret must be the one that is checked"


def test_a_clean_end_lets_go_of_the_leases(cluster: Cluster) -> None:
    run_id = cluster.add_run()
    first, stop = cluster.scheduler("first"), threading.Event()
    first.tick()
    stop.set()
    first.run_forever(stop)
    assert cluster.get(run_id).lease_owner is None
    cluster.scheduler("second").tick()
    assert cluster.get(run_id).lease_owner == "second", "nobody has to wait for a lease that was let go"


def test_a_config_that_cannot_be_used_any_more_fails_the_run(cluster: Cluster) -> None:
    run_id = cluster.add_run(config={"seed": "seven"})
    cluster.scheduler().tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, "invalid_config")
    assert "seed" in run.detail
    assert cluster.launcher.submitted == []


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EACCES, "setup_failed")])
def test_a_folder_that_stays_unusable_fails_the_run_after_start_s(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    def prepare(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_supervisor, "prepare", prepare)
    run_id = cluster.add_run()
    scheduler = cluster.scheduler(max_recoveries=0)
    scheduler.tick()
    cluster.rounds(scheduler, cluster.settings.start_s - 1)
    assert cluster.get(run_id).state == S.STARTING
    cluster.clock.passes(2)
    scheduler.tick()
    run = cluster.get(run_id)
    assert (run.state, run.reason) == (S.FAILED, reason)
    assert os.strerror(code) in run.detail
    assert cluster.launcher.submitted == []


def test_a_job_that_ray_refuses_is_an_event_with_its_words_and_tried_again(cluster: Cluster) -> None:
    cluster.launcher.refusal = "Ray at http://ray rejected job: too many jobs"
    run_id = cluster.add_run()
    scheduler = cluster.scheduler()
    scheduler.tick()
    scheduler.tick()
    assert [c for c in cluster.launcher.calls if c[0] == "submit"] == [("submit", f"{run_id}-1")], "it has to wait"
    delays = [message for kind, message in cluster.messages(run_id) if kind == "launch_delayed"]
    assert delays == ["Ray at http://ray rejected job: too many jobs"]
    cluster.launcher.refusal = ""
    cluster.clock.passes(PAUSE_S)
    scheduler.tick()
    assert [job.id for job in cluster.launcher.submitted] == [f"{run_id}-1"]
    assert cluster.get(run_id).state == S.STARTING


def test_a_job_is_adopted_with_its_secret_and_a_scheduler_that_comes_back_late_changes_nothing(
    cluster: Cluster,
) -> None:
    first, second = cluster.scheduler("first"), cluster.scheduler("second")
    run_id = cluster.running(first)
    own = cluster.row(run_id)
    cluster.clock.passes(cluster.settings.lease_s + 1)
    second.tick()
    adopted = {"lease_owner": "second", "lease_token": 2, "lease_expires_at": cluster.get(run_id).lease_expires_at}
    assert cluster.row(run_id) == own | adopted
    assert len(cluster.launcher.submitted) == 1
    cluster.launcher.ends(f"{run_id}-1", "failed")
    before, messages = cluster.row(run_id), cluster.messages(run_id)
    calls = len(cluster.launcher.calls)
    first.tick()
    assert cluster.row(run_id) == before
    assert cluster.messages(run_id) == messages
    assert {verb for verb, _ in cluster.launcher.calls[calls:]} <= {"statuses"}, "not its job any more"


@pytest.mark.parametrize("state", [S.RUNNING, S.CANCELLING, S.PAUSING])
def test_a_scheduler_that_loses_its_lease_within_a_round_changes_nothing(cluster: Cluster, state: RunState) -> None:
    first, second = cluster.scheduler("first"), cluster.scheduler("second")
    run_id = cluster.running(first)
    if state != S.RUNNING:
        cluster.request(run_id, "cancel" if state == S.CANCELLING else "pause")
    cluster.launcher.ends(f"{run_id}-1", "failed")
    seen: list[dict[str, Any]] = []

    def taken_over(verb: str, _: str) -> None:
        job_id = f"{run_id}-1"
        cluster.launcher.before = lambda verb, job_id: None
        cluster.launcher.jobs[job_id] = JobStatus("running")
        cluster.clock.passes(cluster.settings.lease_s + 1)
        second.tick()
        cluster.launcher.ends(job_id, "failed")
        seen.append(cluster.row(run_id))

    cluster.launcher.before = taken_over
    first.tick()
    (before,) = seen
    assert before["lease_owner"] == "second"
    assert cluster.row(run_id) == before


def test_two_schedulers_at_once_launch_each_run_once_and_keep_the_quota(cluster: Cluster) -> None:
    ids = [cluster.add_run() for _ in range(12)]
    barrier = threading.Barrier(2)

    def work(owner: str) -> None:
        scheduler = cluster.scheduler(owner, max_concurrent_runs=7)
        barrier.wait()
        for _ in range(3):
            scheduler.tick()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, "ab"))  # raises what one of them raised
    states = [cluster.get(run_id) for run_id in ids]
    assert sum(run.state == S.STARTING for run in states) == 7
    assert sum(run.state == S.QUEUED for run in states) == 5
    assert all(run.launch == (run.state == S.STARTING) for run in states)
    assert len(cluster.launcher.submitted) == 7


# A clock that is set back by an hour: times that were stored before it are in the future and say nothing. One that is
# set forward: no time has passed.


BACK_S = -3600.0


def test_a_lease_from_before_is_taken_over_and_one_that_is_a_little_ahead_is_not(cluster: Cluster) -> None:
    run_id = cluster.running(cluster.scheduler("first"))
    for seconds, owner in ((-cluster.settings.lease_s / 2, "first"), (BACK_S, "second")):
        cluster.clock.passes(seconds)
        cluster.scheduler("second").tick()
        assert cluster.get(run_id).lease_owner == owner


def test_silence_and_orphaned_jobs_are_noticed_as_before(cluster: Cluster) -> None:
    scheduler = cluster.scheduler()
    run_id, starting = cluster.running(scheduler), cluster.add_run()
    scheduler.tick()
    cluster.clock.passes(BACK_S)
    cluster.launcher.jobs["orphan"] = JobStatus("running")
    scheduler.tick()
    cluster.rounds(scheduler, cluster.settings.heartbeat_s - 1)
    assert set(cluster.launcher.stopped()) == {"orphan"}, "the others have had no time to report"
    cluster.clock.passes(2)
    scheduler.tick()
    assert set(cluster.launcher.stopped()) == {"orphan", f"{run_id}-1"}
    cluster.rounds(scheduler, cluster.settings.start_s - cluster.settings.heartbeat_s)
    assert set(cluster.launcher.stopped()) == {"orphan", f"{run_id}-1", f"{starting}-1"}


def test_a_launch_waits_no_longer_than_its_pause_and_a_cancel_request_from_before_ends_its_job(
    cluster: Cluster,
) -> None:
    scheduler, run_id = cluster.supervising(max_recoveries=5)
    for _ in range(3):
        cluster.ends(scheduler, f"{run_id}-{cluster.get(run_id).launch}", "failed")
    cluster.clock.passes(BACK_S)
    scheduler.tick()
    cluster.clock.passes(PAUSE_S)
    scheduler.tick()
    assert f"{run_id}-4" in cluster.launcher.jobs
    cluster.report(run_id)
    cluster.request(run_id, "cancel")
    scheduler.tick()
    cluster.clock.passes(BACK_S)
    scheduler.tick()
    cluster.rounds(scheduler, cluster.settings.cancel_grace_s + 1, reporting=run_id)  # its trainer does not stop
    assert cluster.launcher.stopped() == [f"{run_id}-4"]


def test_a_clock_that_is_set_forward_uses_up_no_grace(cluster: Cluster) -> None:
    """The job of the second run is refused, so that it has not started."""
    scheduler, run_id = cluster.supervising()
    cluster.request(run_id, "pause")
    cluster.launcher.refusal = "busy"
    starting = cluster.add_run()
    scheduler.tick()
    cluster.clock.passes(-BACK_S)
    scheduler.tick()
    assert cluster.launcher.stopped() == []
    assert cluster.get(starting).launch == 1
    cluster.launcher.refusal = ""
    cluster.rounds(scheduler, cluster.settings.pause_grace_s + 1, reporting=run_id)
    assert f"{run_id}-1" in cluster.launcher.stopped()
