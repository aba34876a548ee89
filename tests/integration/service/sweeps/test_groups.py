"""Sweeps and groups over HTTP: submitted, listed, cancelled, renamed, deleted as a whole; one action on many runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import select, text
from structlog.testing import capture_logs
from support import queued_runs as runs
from support.scheduling import Cluster, ScriptedLauncher
from support.service_processes import until

from gxpo_services.api.dependencies import find
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event, Group, Run
from gxpo_services.run_states import RunState
from gxpo_services.runs import endpoints, listing
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps import groups, studies
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, preset_names

API = "/api/v1"
SWEEP: dict[str, Any] = {
    "name": "alpha",
    "base": {"preset": "demo", "overrides": ["budget.steps=10"]},
    "grid": {"learner.rule.alpha": [0.1, 1.0]},
    "seeds": [0, 1, 2],
    "tags": ["night"],
    "notes": "n",
    "priority": 2,
}


def test_a_sweep_queues_all_its_runs_as_one_group(client: TestClient, database: Database) -> None:
    planned = client.post(f"{API}/sweeps/validate", json=SWEEP).json()
    assert runs.count(database, Run) == 0
    answer = client.post(f"{API}/sweeps", json=SWEEP)
    assert answer.status_code == 201
    made = answer.json()
    # 2 values × 3 seeds of 10 steps with 3 passes
    assert made["cost"] == planned["cost"]
    assert (made["cost"]["runs"], made["cost"]["steps"], made["cost"]["backward_passes"]) == (6, 60, 180)
    for member in ("name", "group_values"):
        assert [run[member] for run in made["runs"]] == [run[member] for run in planned["runs"]]
    assert made["runs"][0]["group_values"] == {"learner.rule.alpha": 0.1, "seed": 0}
    run = made["runs"][5]
    assert (run["tags"], run["notes"], run["priority"], run["group"]) == (["night"], "n", 2, made["group"]["id"])
    config = client.get(f"{API}/runs/{run['id']}").json()["config"]
    wanted = load_preset("demo", ["budget.steps=10", "learner.rule.alpha=1.0", "seed=2"])
    assert RunConfig.model_validate(config).sha256() == wanted.sha256()
    assert [run["progress"]["queue_position"] for run in made["runs"]] == [1, 2, 3, 4, 5, 6]
    with database.reading() as session:
        kinds = list(session.scalars(select(Event.kind).where(Event.run_number.is_not(None))))
        assert kinds == ["submitted"] * 6


def test_a_sweep_with_one_bad_run_makes_nothing(client: TestClient, database: Database) -> None:
    bad = SWEEP | {"grid": {"learner.rule.alpha": [0.1, 7], "x.y": [1]}}
    planned = client.post(f"{API}/sweeps/validate", json=bad).raise_for_status().json()
    answer = client.post(f"{API}/sweeps", json=bad)
    assert (planned["valid"], answer.status_code) == (False, 422)
    assert answer.json()["errors"] == planned["errors"]
    assert {error["field"] for error in planned["errors"]} == {"grid.x.y"}
    assert (runs.count(database, Run), runs.count(database, Group)) == (0, 0)


@pytest.mark.parametrize("kind", ["sweeps", "studies"])
def test_a_repeated_request_finds_what_it_made_though_its_data_is_gone(
    client: TestClient, tmp_path: Path, kind: str
) -> None:
    file, headers = tmp_path / "data.jsonl", {"Idempotency-Key": "mine"}
    file.write_text('{"problem": "1+1?", "answer": "2"}\n' * 8)
    overrides = [f'data.source="{file}"', 'evaluation.benchmarks=["word_problems"]']
    body = {
        "sweeps": SWEEP | {"base": SWEEP["base"] | {"overrides": overrides}},
        "studies": {"toml": tomli_w.dumps(STUDY | {"overrides": overrides})},
    }[kind]
    made = client.post(f"{API}/{kind}", json=body, headers=headers)
    assert made.status_code == 201, made.text
    file.unlink()
    again = client.post(f"{API}/{kind}", json=body, headers=headers)
    assert (again.status_code, again.json()) == (200, made.json())
    assert client.post(f"{API}/{kind}", json=body | {"notes": "m"}, headers=headers).status_code == 409
    assert client.post(f"{API}/{kind}", json=body).status_code == 422


def test_trainers_report_while_a_run_a_sweep_or_a_study_is_checked(
    client: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take seconds, and on SQLite whatever writes needs the one turn that there is."""
    free = app.state.session_gate.value
    run = client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"]
    client.post(f"{API}/runs/{run}/cancel").raise_for_status()
    for module, name, path, body in (
        (endpoints, "checked", "/runs", {"preset": "demo"}),
        (endpoints, "checked", f"/runs/{run}/clone", {"overrides": ["seed=1"]}),
        (endpoints, "checked", f"/runs/{run}/retry", None),
        (groups, "plan", "/sweeps", SWEEP),
        (studies, "checked", "/studies", BODY),
    ):
        plan, while_planned = getattr(module, name), set[int]()

        def planned(*given: Any, plan: Callable[..., Any] = plan, seen: set[int] = while_planned) -> Any:
            seen.add(app.state.session_gate.value)
            return plan(*given)

        monkeypatch.setattr(module, name, planned)
        assert client.post(f"{API}{path}", json=body).status_code == 201
        assert while_planned == {free}


def test_the_catalogue(client: TestClient) -> None:
    schema = client.get(f"{API}/schema").json()
    assert schema == RunConfig.model_json_schema()
    presets = {preset["name"]: preset for preset in client.get(f"{API}/presets").json()}
    assert sorted(presets) == preset_names()
    for name, preset in presets.items():
        assert RunConfig.model_validate(preset["config"]) == load_preset(name)
        valid = client.post(f"{API}/runs/validate", json={"toml": preset["toml"]}).json()
        assert valid["config"] == preset["config"]
    assert "embedded word problems" in presets["demo"]["summary"]
    published = client.get(f"{API}/published").json()
    assert [table["name"] for table in published["tables"]] == [table.name for table in gxpo_paper().tables]
    sweeps = {preset["name"]: preset for preset in client.get(f"{API}/sweeps/presets").json()}
    assert sorted(sweeps) == ["alpha", "k", "rules", "tau"]
    assert sweeps["rules"]["control"]


@pytest.fixture
def sweep(client: TestClient) -> tuple[str, list[str]]:
    """A group of three queued runs."""
    body = {"name": "s", "base": {"preset": "demo"}, "seeds": [0, 1, 2]}
    made = client.post(f"{API}/sweeps", json=body).json()
    return made["group"]["id"], [run["id"] for run in made["runs"]]


def test_a_group_is_cancelled_as_a_whole_and_twice_is_once(
    client: TestClient, database: Database, sweep: tuple[str, list[str]]
) -> None:
    group, ids = sweep
    runs.change(database, ids[0], state=RunState.SUCCEEDED)
    runs.change(database, ids[1], state=RunState.RUNNING)
    for _ in range(2):
        answer = client.post(f"{API}/groups/{group}/cancel").raise_for_status()
        assert answer.json()["by_state"] == {"succeeded": 1, "cancelling": 1, "cancelled": 1}
    assert len(client.get(f"{API}/audit?kind=group_cancelled").json()["items"]) == 1
    assert client.post(f"{API}/groups/g0/cancel").status_code == 404


def test_a_rename_with_if_match_and_its_audit(client: TestClient, sweep: tuple[str, list[str]]) -> None:
    path = f"{API}/groups/{sweep[0]}"
    tag = client.get(path).headers["etag"]
    first = client.patch(path, json={"name": "new"}, headers={"If-Match": tag})
    assert (first.status_code, first.json()["name"]) == (200, "new")
    assert client.get(path).headers["etag"] == first.headers["etag"] != tag
    assert client.patch(path, json={"name": "late"}, headers={"If-Match": tag}).status_code == 412
    assert client.get(path).json()["name"] == "new"
    (entry,) = client.get(f"{API}/audit?kind=group_renamed").json()["items"]
    assert entry["message"] == "group 's' was renamed to 'new'"
    for bad in ({}, {"name": ""}, {"name": None}, {"kind": "study"}):
        assert client.patch(path, json=bad).status_code == 422


def test_a_deleted_group_keeps_its_runs_or_takes_those_that_ended(
    client: TestClient, settings: ServiceSettings, sweep: tuple[str, list[str]], token_for: Callable[[str], str]
) -> None:
    group, ids = sweep
    other = {"Authorization": f"Bearer {token_for('submitter')}"}
    assert client.delete(f"{API}/groups/{group}", headers=other).status_code == 403
    mine = client.post(f"{API}/groups", json={"name": "mine"}, headers=other).json()["id"]
    assert client.delete(f"{API}/groups/{mine}", headers=other).status_code == 204
    refused = client.delete(f"{API}/groups/{group}", params={"runs": "delete"})
    assert refused.status_code == 409, "queued runs"
    assert client.get(f"{API}/groups/{group}").json()["num_runs"] == 3
    assert client.delete(f"{API}/groups/{group}").status_code == 204
    assert client.get(f"{API}/groups/{group}").status_code == 404
    assert [client.get(f"{API}/runs/{run_id}").json()["group"] for run_id in ids] == [None] * 3

    made = client.post(f"{API}/sweeps", json={"name": "t", "base": {"preset": "demo"}}).json()
    run_id = made["runs"][0]["id"]
    client.post(f"{API}/runs/{run_id}/cancel")
    (settings.artifacts / run_id / "checkpoints").mkdir(parents=True)
    assert client.delete(f"{API}/groups/{made['group']['id']}", params={"runs": "delete"}).status_code == 204
    assert client.get(f"{API}/runs/{run_id}").status_code == 404
    assert not (settings.artifacts / run_id).exists()


def test_an_action_answers_for_each_run_in_the_order_of_the_request(
    client: TestClient, database: Database, sweep: tuple[str, list[str]]
) -> None:
    ids = sorted(sweep[1], reverse=True)
    runs.change(database, ids[1], state=RunState.SUCCEEDED)

    def act(action: str, wanted: list[str]) -> list[tuple[str, str | None, int | None]]:
        answer = client.post(f"{API}/runs/actions", json={"action": action, "runs": wanted}).raise_for_status()
        return [(i["run"], i["state"], i["problem"] and i["problem"]["status"]) for i in answer.json()["items"]]

    absent = "r" + "0" * 20
    assert act("cancel", [*ids, absent, ids[0]]) == [
        (ids[0], "cancelled", None),
        (ids[1], "succeeded", 409),
        (ids[2], "cancelled", None),
        (absent, None, 404),
    ]
    assert act("archive", ids[:2]) == [(ids[0], "cancelled", None), (ids[1], "succeeded", None)]
    assert client.get(f"{API}/runs", params={"archived": "true"}).json()["total"] == 2
    assert act("delete", ids[:1]) == [(ids[0], None, None)]
    assert client.get(f"{API}/runs/{ids[0]}").status_code == 404
    for bad in ({"action": "retry", "runs": ids}, {"action": "cancel", "runs": []}, {"runs": ids}):
        assert client.post(f"{API}/runs/actions", json=bad).status_code == 422


def test_no_run_is_shown_for_an_action_on_many(
    client: TestClient, sweep: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read the whole queue for each run, while all are locked."""
    group, ids = sweep
    shown = Mock(wraps=listing.list_rows)
    monkeypatch.setattr(listing, "list_rows", shown)
    for action in ("archive", "unarchive", "cancel", "delete"):
        client.post(f"{API}/runs/actions", json={"action": action, "runs": ids[:1]}).raise_for_status()
    client.post(f"{API}/groups/{group}/cancel").raise_for_status()
    assert shown.call_count == 0


WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/runs/actions", {"action": "archive", "runs": ["r2", "r1", "r0"]}),
        ("POST", "/groups/{group}/cancel", None),
        ("DELETE", "/groups/{group}", None),
        ("DELETE", "/groups/{group}?runs=delete", None),
    ],
)
def test_requests_about_many_runs_lock_them_in_one_order(
    client: TestClient, database: Database, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """A run is locked. One request waits for it. Were another one waiting for it with the rest locked, neither could
    go on after that."""
    group = client.post(f"{API}/groups", json={"name": "g"}).json()["id"]
    with database.reading() as session:
        number = find(session, Group, group).number
    state = RunState.FAILED if "delete" in path else RunState.QUEUED
    for run_id in ("r2", "r1", "r0"):  # of a sweep, most runs are made in the same millisecond
        runs.add_run(database, id=run_id, state=state)
        runs.change(database, run_id, group_number=number)
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/runs/actions", {"action": "unarchive", "runs": ["r0", "r1", "r2"]}),
        (method, path.format(group=group), body),
    ]
    with ThreadPoolExecutor(2) as pool, database.autocommit_connection() as connection:
        answers = []
        with database.writing() as session:
            find(session, Run, "r0", lock=True)
            for one, (verb, address, content) in enumerate(asked, start=1):
                answers.append(pool.submit(client.request, verb, f"{API}{address}", json=content))
                until(lambda one=one: answers[-1].done() or connection.scalar(WAITING) == one, f"{one} to wait")
                assert not answers[-1].done()
        assert [answer.result().is_success for answer in answers] == [True] * 2


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_scheduler_that_starts_runs_locks_them_in_that_order_too(database: Database, cluster: Cluster) -> None:
    for run_id, queued_at in (("r0", 2.0), ("r1", 1.0)):  # r1 is the first to start
        runs.add_run(database, id=run_id, queued_at=queued_at)
    scheduler = cluster.scheduler()
    with ThreadPoolExecutor(1) as pool, database.autocommit_connection() as connection:
        with database.writing() as session:
            find(session, Run, "r0", lock=True)
            round_ = pool.submit(scheduler.tick)
            until(lambda: round_.done() or connection.scalar(WAITING) == 1, "the scheduler to wait")
            session.execute(select(Run.number).where(Run.id == "r1").with_for_update(nowait=True))
        round_.result()
    assert [job.id for job in cluster.launcher.submitted] == ["r1-1", "r0-1"], "the order of the queue"


# Studies over REST: the first runs are queued at once, the next ones as runs end.


STUDY: dict[str, Any] = {
    "name": "small",
    "title": "Small",
    "baseline": "grpo",
    "seeds": [0, 1],
    "backward_passes": 12,
    "evaluate_every": 6,
    "ladder": {"learning_rates": [1e-5, 2e-5], "seeds": [7], "backward_passes": 6},
    "arms": {
        "grpo": {"label": "GRPO", "overrides": ["learner.rule.name=grpo"]},
        "gxpo": {"label": "GXPO", "overrides": ["learner.rule.gate.mode=never"]},
    },
}
BODY = {"toml": tomli_w.dumps(STUDY), "tags": ["night"], "notes": "n", "priority": 2}


@pytest.fixture
def scheduler(database: Database, settings: ServiceSettings) -> Scheduler:
    """A scheduler that may not start anything: only what it queues matters here."""
    stopped = settings.model_copy(update={"max_concurrent_runs": 0, "quota_cpus": 0.0, "quota_gpus": 0.0})
    return Scheduler(database, stopped, ScriptedLauncher(), owner="tests", api_answers=lambda: True)


def queued(database: Database) -> list[str]:
    with database.reading() as session:
        runs = session.scalars(select(Run).where(Run.state == RunState.QUEUED).order_by(Run.number))
        return [f"{v['stage']} {v['arm']} {v['learning_rate']:g} {v['seed']}" for r in runs if (v := r.group_values)]


def end_all(
    database: Database, accuracy: dict[str, float | None], state: RunState = RunState.SUCCEEDED, **more: Any
) -> None:
    """End every queued run; accuracy: by arm."""
    with database.writing() as session:
        for run in session.scalars(select(Run).where(Run.state == RunState.QUEUED)):
            run.state, run.score, run.ended_at = state, accuracy[run.group_values["arm"]], float(run.number)
            for name, value in more.items():
                setattr(run, name, value)


def test_a_study_climbs_ladders_to_all_seeds(client: TestClient, database: Database, scheduler: Scheduler) -> None:
    made, again = (client.post(f"{API}/studies", json=BODY, headers={"Idempotency-Key": "mine"}) for _ in range(2))
    assert (made.status_code, again.status_code) == (201, 200), made.text
    assert made.json() == again.json()
    assert queued(database) == ["ladder grpo 1e-05 7", "ladder gxpo 1e-05 7"]
    group = client.get(f"{API}/groups/{made.json()['group']['id']}").json()
    assert (group["kind"], group["name"], group["num_runs"]) == ("study", "small", 2)
    run = group["runs"][0]
    about = (run["name"], run["tags"], run["notes"], run["priority"])
    assert about == ("small grpo 1e-05 seed 7", ["night"], "n", 2)
    # 2 arms × (2 rates × 6 passes + 2 seeds × 12 passes).
    assert made.json()["cost"] == {"runs": 8, "backward_passes": 72}
    scheduler.tick()
    assert len(queued(database)) == 2, "nothing is queued twice"
    end_all(database, {"grpo": 0.3, "gxpo": 0.4})
    scheduler.tick()
    assert queued(database) == ["ladder grpo 2e-05 7", "ladder gxpo 2e-05 7"]
    end_all(database, {"grpo": 0.5, "gxpo": 0.3})
    scheduler.tick()
    # GRPO is better at the second rate, GXPO at the first.
    expected = ["report grpo 2e-05 0", "report grpo 2e-05 1", "report gxpo 1e-05 0", "report gxpo 1e-05 1"]
    assert queued(database) == expected
    end_all(database, {"grpo": 0.5, "gxpo": 0.6})
    scheduler.tick()
    assert queued(database) == []
    study = client.get(made.headers["location"]).json()
    assert (study["complete"], study["runs_done"], study["failed"]) == (True, 8, [])
    assert [(arm["label"], arm["learning_rate"], arm["seeds_done"]) for arm in study["arms"]] == [
        ("GRPO", 2e-5, [0, 1]), ("GXPO", 1e-5, [0, 1])
    ]  # fmt: skip
    ids = [run["id"] for run in client.get(f"{API}/groups/{study['group']['id']}").json()["runs"]]
    for deleted in (ids[-1:], ids[:-1]):
        for run in deleted:
            assert client.delete(f"{API}/runs/{run}").status_code == 204
        scheduler._ended_runs.clear()  # as after its restart
        scheduler.tick()
        assert queued(database) == []
        study = client.get(made.headers["location"]).json()
        assert (study["complete"], study["due"]) == (True, 0)


def test_a_failed_run_is_named_until_retried_and_one_that_diverges_is_a_result(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    made = client.post(f"{API}/studies", json=BODY)
    end_all(database, {"grpo": 0.0, "gxpo": 0.0}, RunState.FAILED, reason="training_error")
    scheduler.tick()
    failed = client.get(made.headers["location"]).json()["failed"]
    assert len(failed) == 2
    for run in failed:
        assert client.post(f"{API}/runs/{run}/retry").status_code == 201
    assert client.get(made.headers["location"]).json()["failed"] == []
    end_all(database, {"grpo": 0.3, "gxpo": 0.3})
    scheduler.tick()
    assert queued(database) == ["ladder grpo 2e-05 7", "ladder gxpo 2e-05 7"]
    end_all(database, {"grpo": 0.9, "gxpo": 0.9}, RunState.FAILED, reason="diverged")
    scheduler.tick()
    assert [line.split()[2] for line in queued(database)] == ["1e-05"] * 4
    assert client.get(made.headers["location"]).json()["failed"] == []


def test_a_run_without_a_score_is_no_result(client: TestClient, database: Database, scheduler: Scheduler) -> None:
    """Rates without a score would all count as 0, and the first of them as the best."""
    made = client.post(f"{API}/studies", json=BODY)
    ids = [run["id"] for run in client.get(f"{API}/groups/{made.json()['group']['id']}").json()["runs"]]
    end_all(database, {"grpo": None, "gxpo": 0.4})
    scheduler.tick()
    assert queued(database) == ["ladder gxpo 2e-05 7"]
    study = client.get(made.headers["location"]).json()
    assert (study["runs_done"], study["failed"]) == (1, ids[:1])
    assert client.delete(f"{API}/runs/{ids[0]}").status_code == 204
    scheduler.tick()
    assert queued(database) == ["ladder gxpo 2e-05 7", "ladder grpo 1e-05 7"]


@pytest.mark.each_database
def test_the_points_of_a_search_stay_those_that_were_queued(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    """They are numbered by the order of the settings, which PostgreSQL does not keep in JSON."""
    settings = {
        "learner.optimizer.learning_rate": [1e-5, 2e-5, 4e-5],
        "learner.optimizer.schedule": ["constant", "linear"],
        "learner.mini_batches": [1, 2],
    }
    search = {"settings": settings, "runs": 4, "seeds": [7], "backward_passes": 6}
    body = {name: value for name, value in STUDY.items() if name != "ladder"} | {"search": search}
    made = client.post(f"{API}/studies", json={"toml": tomli_w.dumps(body)})
    assert len(queued(database)) == 8, made.text
    end_all(database, {"grpo": 0.3, "gxpo": 0.4})
    scheduler.tick()
    assert [line.split()[0] for line in queued(database)] == ["report"] * 4
    study = client.get(made.headers["location"]).json()
    assert (study["group"]["num_runs"], study["runs_done"]) == (12, 8)
    assert [*study["study"]["search"]["settings"]] == [*settings]


def test_a_study_goes_on_when_a_run_ends_and_another_is_deleted(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    """As many runs have ended as before."""
    group = client.post(f"{API}/studies", json=BODY).json()["group"]["id"]
    grpo, gxpo = (run["id"] for run in client.get(f"{API}/groups/{group}").json()["runs"])
    runs.change(database, grpo, state=RunState.FAILED, reason="training_error", ended_at=100.0)
    scheduler.tick()
    assert queued(database) == ["ladder gxpo 1e-05 7"]
    assert client.delete(f"{API}/runs/{grpo}").status_code == 204
    runs.change(database, gxpo, state=RunState.SUCCEEDED, score=0.4, ended_at=200.0)
    scheduler.tick()
    assert queued(database) == ["ladder grpo 1e-05 7", "ladder gxpo 2e-05 7"]


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer
def test_a_study_that_is_cancelled_while_its_next_runs_are_queued_is_cancelled_with_them(
    client: TestClient, database: Database, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = client.post(f"{API}/studies", json=BODY).json()["group"]["id"]
    end_all(database, {"grpo": 0.3, "gxpo": 0.4})
    cancels: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool, database.autocommit_connection() as connection:

        def study_of(of: Group) -> Any:
            """The scheduler has just seen that the study is not cancelled."""
            cancels.append(pool.submit(client.post, f"{API}/groups/{group}/cancel"))
            until(lambda: cancels[0].done() or connection.scalar(WAITING) == 1, "the cancellation to end or to wait")
            return real(of)

        real = studies.study_of
        monkeypatch.setattr(studies, "study_of", study_of)
        scheduler.tick()
        by_state = cancels[0].result().raise_for_status().json()["by_state"]
    assert (by_state, queued(database)) == ({"succeeded": 2, "cancelled": 2}, [])


def test_a_study_goes_on_when_all_its_ended_runs_are_deleted(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    group = client.post(f"{API}/studies", json=BODY).json()["group"]["id"]
    end_all(database, {"grpo": 0.0, "gxpo": 0.0}, RunState.FAILED, reason="training_error")
    scheduler.tick()
    assert queued(database) == []
    for run in client.get(f"{API}/groups/{group}").json()["runs"]:
        assert client.delete(f"{API}/runs/{run['id']}").status_code == 204
    scheduler.tick()
    assert queued(database) == ["ladder grpo 1e-05 7", "ladder gxpo 1e-05 7"]


def test_a_bad_study_is_refused_and_queues_nothing(client: TestClient, database: Database) -> None:
    arms, ladder = STUDY["arms"], STUDY["ladder"]
    # The floats end at 1.8e308.
    far = arms | {"far": {"label": "F", "learning_rate_factor": 1e308, "learning_rate_of": "gxpo"}}
    refused: dict[str, dict[str, Any]] = {
        "is no arm": {"baseline": "ppo"},
        "arms.bad: ": {"arms": arms | {"bad": {"label": "B", "overrides": ["learner.rule.name=ppo"]}}},
        "arms.grpo: ": {"overrides": ["model.trust_remote_code=true"]},
        "arms.grpo: preset demo cannot be used:\\n  seed = -1: must be at least 0": {"seeds": [0, -1]},
        "arms.grpo: logging.project: must not contain a NUL": {"overrides": ['logging.project="a\\u0000"']},
        "title: must not contain a NUL": {"title": "a\0"},
        "arms.far: learning_rate: is inf": {"arms": far, "ladder": ladder | {"learning_rates": [1e-5, 20.0]}},
    }
    for message, changes in refused.items():
        answer = client.post(f"{API}/studies", json={"toml": tomli_w.dumps(STUDY | changes)})
        assert (answer.status_code, message in answer.text) == (422, True), message
    assert client.post(f"{API}/studies", json={"toml": "a = "}).status_code == 422
    with_mark = "\ufeff" + tomli_w.dumps(STUDY | {"title": 3, "seeds": "x"})
    errors = client.post(f"{API}/studies", json={"toml": with_mark}).json()["errors"]
    assert errors == [
        {"field": "toml.seeds", "message": "must be a list in brackets"},
        {"field": "toml.title", "message": "must be text; put it in quotes"},
    ]
    assert queued(database) == []


def test_a_cancelled_study_queues_no_further_runs_and_nobody_adds_any(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    group = client.post(f"{API}/studies", json=BODY).json()["group"]["id"]
    run = client.get(f"{API}/groups/{group}").json()["runs"][0]["id"]
    for path, body in {"/runs": {"preset": "demo"}, f"/runs/{run}/clone": {}}.items():
        answer = client.post(f"{API}{path}", json={"group": group} | body)
        assert (answer.status_code, "is a study, which queues its own runs" in answer.text) == (422, True)
    assert client.post(f"{API}/groups/{group}/cancel").json()["by_state"] == {"cancelled": 2}
    for run in client.get(f"{API}/groups/{group}").json()["runs"]:
        runs.change(database, run["id"], state=RunState.SUCCEEDED, score=0.5)
    scheduler.tick()
    assert runs.count(database) == 2


def test_a_study_of_another_version_is_a_conflict_and_stops_no_other(
    client: TestClient, database: Database, scheduler: Scheduler
) -> None:
    old, other = (client.post(f"{API}/studies", json=BODY).json()["group"]["id"] for _ in range(2))
    with database.writing() as session:
        for group in session.scalars(select(Group)):
            study = json.loads(group.spec["study"])  # stored as an object by earlier versions
            group.spec = group.spec | {"study": study | {"budget": 3} if group.id == old else study}
    refused = client.get(f"{API}/studies/{old}")
    assert (refused.status_code, "is of another version of gxpo" in refused.json()["detail"]) == (409, True)
    end_all(database, {"grpo": 0.3, "gxpo": 0.4})
    with capture_logs() as logged:
        for _ in range(3):
            scheduler.tick()
    assert [entry["event"] for entry in logged].count("study cannot continue") == 1, "logged once"
    assert queued(database) == ["ladder grpo 2e-05 7", "ladder gxpo 2e-05 7"]
    assert client.get(f"{API}/groups/{old}").json()["num_runs"] == 2
    assert client.get(f"{API}/groups/{other}").json()["num_runs"] == 4
