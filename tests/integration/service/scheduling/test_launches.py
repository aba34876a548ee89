"""Launches and leases of the scheduler, on both databases."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import queued_runs as runs
from support.scheduling import PAUSE_S, Clock, Make
from support.scripted_launcher import Crash, ScriptedLauncher

from gxpo_services.api.principals import same_hash
from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import run_supervisor
from gxpo_services.scheduling.launcher import JobRefused
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_run

S = RunState


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


@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_the_servers_lists_reach_the_trainer(
    launcher: ScriptedLauncher, scheduler_of: Make, database: Database, kind: str
) -> None:
    runs.add_run(database)
    urls = ("http://host:8100/", "https://host.example/path")
    lists: dict[str, Any] = {f"allowed_{kind}s": ("a:B", "c:D"), f"allowed_{kind}_urls": urls}
    lists["allowed_plugins"] = ("lookahead", "e:F")
    scheduler_of(**lists).tick()
    (job,) = launcher.submitted
    assert job.env[f"GXPO_{kind.upper()}_ALLOWLIST"] == "a:B,c:D"
    assert job.env["GXPO_PLUGIN_ALLOWLIST"] == "lookahead,e:F"
    assert job.env[f"GXPO_{kind.upper()}_URLS"] == "http://host:8100/,https://host.example/path"


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
        monkeypatch.setattr(run_supervisor, "prepare", crash_in_prepare)
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


def test_a_folder_that_cannot_be_used_is_tried_again(
    database: Database, scheduler_of: Make, tmp_path: Path, launcher: ScriptedLauncher, clock: Clock
) -> None:
    root = tmp_path / "root"
    root.write_text("")
    run_id = runs.add_run(database)
    scheduler = scheduler_of(artifact_root=root)
    for _ in range(5):
        scheduler.tick()
        clock.passes(1.0)
    assert runs.get(database, run_id).state == S.STARTING
    delays = [message for kind, message in runs.messages(database, run_id) if kind == "launch_delayed"]
    assert len(delays) == 1, "an event for each cause, not for each attempt"
    assert "GXPO_ARTIFACT_ROOT" in delays[0]
    root.unlink()
    clock.passes(PAUSE_S)
    scheduler.tick()
    assert [job.id for job in launcher.submitted] == [f"{run_id}-1"]


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EACCES, "setup_failed")])
def test_a_folder_that_stays_unusable_fails_the_run_after_start_s(
    database: Database,
    settings: ServiceSettings,
    scheduler_of: Make,
    launcher: ScriptedLauncher,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    reason: str,
) -> None:
    def prepare(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_supervisor, "prepare", prepare)
    run_id = runs.add_run(database)
    scheduler = scheduler_of(max_recoveries=0)
    scheduler.tick()
    clock.passes(settings.start_s - 1)
    scheduler.tick()
    assert runs.get(database, run_id).state == S.STARTING
    clock.passes(2)
    scheduler.tick()
    run = runs.get(database, run_id)
    assert (run.state, run.reason) == (S.FAILED, reason)
    assert os.strerror(code) in run.detail
    assert launcher.submitted == []


def test_a_job_that_ray_refuses_is_an_event_with_its_words_and_tried_again(
    database: Database, scheduler_of: Make, launcher: ScriptedLauncher, clock: Clock
) -> None:
    def refuse(verb: str, job_id: str) -> None:
        if verb == "submit":
            raise JobRefused("Ray at http://ray rejected job: too many jobs")

    launcher.before = refuse
    run_id = runs.add_run(database)
    scheduler = scheduler_of()
    scheduler.tick()
    scheduler.tick()
    assert [call for call in launcher.calls if call[0] == "submit"] == [("submit", f"{run_id}-1")], "it has to wait"
    delays = [message for kind, message in runs.messages(database, run_id) if kind == "launch_delayed"]
    assert delays == ["Ray at http://ray rejected job: too many jobs"]
    launcher.before = lambda verb, job_id: None
    clock.passes(PAUSE_S)
    scheduler.tick()
    assert [job.id for job in launcher.submitted] == [f"{run_id}-1"]
    assert runs.get(database, run_id).state == S.STARTING


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
    before, messages = runs.row(database, run_id), runs.messages(database, run_id)
    calls = len(launcher.calls)
    first.tick()
    assert runs.row(database, run_id) == before
    assert runs.messages(database, run_id) == messages
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
        runs.request(database, run_id, "cancel" if state == S.CANCELLING else "pause", at=clock.now)
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
