"""Runs over HTTP: submit, validate, show, edit, control, clone, retry, delete."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import select
from support import queued_runs as runs, reporting
from support.reported_runs import add_group

from gxpo_services.api.dependencies import find
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event, IdempotencyKey, MetricLast, MetricName, Run, RunTag
from gxpo_services.outputs import samples
from gxpo_services.run_states import RunState
from gxpo_services.runs import changes, endpoints, service
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, to_toml

API = "/api/v1"
BODY: dict[str, Any] = {"preset": "demo", "tags": ["b", "a", "b"], "notes": "first\nlight"}
Submit = Callable[..., dict[str, Any]]
LeadTo = Callable[[str, str], None]


@pytest.fixture
def submit(client: TestClient) -> Submit:
    def make(**body: Any) -> dict[str, Any]:
        run: dict[str, Any] = client.post(f"{API}/runs", json={**BODY, **body}).raise_for_status().json()
        return run

    return make


@pytest.fixture
def lead_to(database: Database) -> LeadTo:
    return lambda run_id, state: runs.change(database, run_id, state=RunState(state))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_submitted_run_is_queued_whole(client: TestClient, database: Database) -> None:
    answer = client.post(f"{API}/runs", json=BODY)
    assert answer.status_code == 201
    run = answer.json()
    assert answer.headers["location"] == f"{API}/runs/{run['id']}"
    assert client.get(answer.headers["location"]).json() == run
    assert (run["state"], run["rule"], run["rule_label"], run["model"]) == ("queued", "gxpo", "GXPO K=5", "starter")
    assert (run["tags"], run["notes"], run["created_by"]) == (["a", "b"], "first\nlight", "admin")
    assert run["cost"]["backward_passes"] == 120
    assert run["progress"]["fraction"] == 0
    assert run["progress"]["queue_position"] == 1
    assert run["possible_actions"] == ["cancel", "clone"]
    with database.reading() as session:
        row = find(session, Run, run["id"])
        assert RunConfig.model_validate(row.config) == load_preset("demo")
        assert (row.cpus, row.gpus) == (2.0, 1.0), "it takes a GPU if there is one"
        assert row.config_sha256 == load_preset("demo").sha256()
        event = session.scalars(select(Event).where(Event.run_number == row.number)).one()
        assert (event.actor, event.kind) == ("token:admin", "submitted")


def test_a_refused_run_names_every_bad_member_and_leaves_nothing(client: TestClient, database: Database) -> None:
    config = {"learner": {"rule": {"name": "gxpo", "k": 1}}, "placement": {"ray_address": "auto"}}
    answer = client.post(f"{API}/runs", json={"config": config, "group": "g0"}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 422
    fields = [error["field"] for error in answer.json()["errors"]]
    assert fields == ["config.learner.rule.k", "config.placement.ray_address", "group"]
    assert [runs.count(database, table) for table in (Run, Event, IdempotencyKey)] == [0, 1, 0]  # the event: a token
    assert client.post(f"{API}/runs", json=BODY, headers={"Idempotency-Key": "k"}).status_code == 201


def test_validate_shows_errors_cost_completed_config_and_equal_runs(
    client: TestClient, submit: Submit, database: Database
) -> None:
    earlier = submit(name="earlier")
    validation = client.post(f"{API}/runs/validate", json=BODY).raise_for_status().json()
    assert validation["valid"]
    assert (validation["cost"]["steps"], validation["cost"]["backward_passes"]) == (40, 120)
    assert [run["id"] for run in validation["equal_runs"]] == [earlier["id"]]
    assert validation["toml"] == to_toml(load_preset("demo"))
    assert validation["config"]["learner"]["rule"]["k"] == 5
    plan = validation["plan"]
    assert (plan["device"], plan["fits"], validation["plan_problem"]) == ("cpu", True, None)
    assert [rule["backward_passes"] for rule in plan["rules"] if rule["own"]] == [120]
    bad = client.post(f"{API}/runs/validate", json={"config": {"seed": -1}}).json()
    assert not bad["valid"]
    assert [error["field"] for error in bad["errors"]] == ["config.seed"]
    assert runs.count(database, Run) == 1


def test_only_the_submitter_or_an_admin_deletes_a_run(anonymous: TestClient, token_for: Callable[[str], str]) -> None:
    mine, other, admin = (bearer(token_for(role)) for role in ("submitter", "submitter", "admin"))
    for owner in (mine, admin):
        path = f"{API}/runs/{anonymous.post(f'{API}/runs', json=BODY, headers=mine).json()['id']}"
        assert anonymous.post(f"{path}/cancel", headers=other).status_code == 200
        assert anonymous.delete(path, headers=other).status_code == 403
        assert anonymous.delete(path, headers=owner).status_code == 204


def test_a_patch_is_recorded(client: TestClient, submit: Submit, database: Database) -> None:
    run = submit()
    path = f"{API}/runs/{run['id']}"
    changed = client.patch(path, json={"name": "new", "tags": ["b", "c"], "archived": True}).json()
    assert (changed["name"], changed["tags"], changed["archived"]) == ("new", ["b", "c"], True)
    assert (changed["notes"], changed["config"]) == (run["notes"], run["config"])
    assert changed["updated_at"] > run["updated_at"]
    assert client.patch(path, json={}).json() == changed
    assert client.patch(path, json={"notes": "", "tags": []}).json()["tags"] == []
    for bad in ({"name": ""}, {"state": "failed"}, {"tags": ["x" * 61]}, {"priority": 10**9}):
        assert client.patch(path, json=bad).status_code == 422
    assert client.patch(f"{API}/runs/r0", json={"name": "x"}).status_code == 404
    reset = client.patch(path, json=dict.fromkeys(("name", "tags", "notes", "archived", "priority"))).json()
    assert reset["name"] == run["config"]["name"] != "new"
    assert (reset["tags"], reset["notes"], reset["archived"], reset["priority"]) == ([], "", False, 0)
    with database.reading() as session:
        kinds = list(session.scalars(select(Event.kind).where(Event.run_number.is_not(None)).order_by(Event.number)))
        assert kinds == ["submitted", "edited", "edited", "edited"]


def test_an_edit_with_if_match_never_overwrites_one_that_its_author_has_not_seen(
    client: TestClient, submit: Submit, database: Database
) -> None:
    run = submit()
    path = f"{API}/runs/{run['id']}"
    read = client.get(path).headers["etag"]
    launched = reporting.launch(database, run["id"])
    reporting.send(database, launched, reporting.body(1, metrics=[reporting.metric_row(1, a=1.0)]))
    assert client.get(path).headers["etag"] == read, "progress is no edit"
    mine = client.patch(path, json={"notes": "mine"}, headers={"If-Match": read})
    assert (mine.status_code, client.get(path).headers["etag"]) == (200, mine.headers["etag"])
    theirs = client.patch(path, json={"notes": "theirs"}, headers={"If-Match": read})
    assert (theirs.status_code, theirs.json()["type"]) == (412, "/api/v1/problems#precondition-failed")
    weak = client.patch(path, json={"notes": "weak"}, headers={"If-Match": f"W/{mine.headers['etag']}"})
    assert weak.status_code == 412
    assert client.get(path).json()["notes"] == "mine"
    for matching in ("*", mine.headers["etag"]):
        assert client.patch(path, json={"notes": "mine"}, headers={"If-Match": matching}).status_code == 200
    back = client.patch(path, json={"notes": run["notes"]})
    assert back.headers["etag"] == read, "the same content has the same tag"


def test_a_request_leads_to_its_state_or_is_refused_with_the_present_one(
    client: TestClient, submit: Submit, lead_to: LeadTo
) -> None:
    run = submit()
    path = f"{API}/runs/{run['id']}"
    lead_to(run["id"], "running")
    assert client.post(f"{path}/pause").json()["state"] == "pausing"
    refused = client.post(f"{path}/resume")
    assert (refused.status_code, refused.json()["state"]) == (409, "pausing")
    assert "cannot resume" in refused.json()["detail"]
    assert client.post(f"{path}/cancel").json()["state"] == "cancelling"
    ended = client.post(f"{API}/runs/{submit()['id']}/cancel").json()
    assert (ended["state"], ended["ended_at"] is None) == ("cancelled", False)


def test_a_clone_has_the_config_with_overrides_and_names_its_original(
    client: TestClient, submit: Submit, lead_to: LeadTo
) -> None:
    run = submit(name="original", priority=3)
    lead_to(run["id"], "running")
    path = f"{API}/runs/{run['id']}/clone"
    plain = client.post(path).raise_for_status().json()
    assert (plain["config"], plain["config_sha256"]) == (run["config"], run["config_sha256"])
    body = {"overrides": ["learner.rule.name=sfpo", "name=other"], "tags": []}
    changed = client.post(path, json=body).json()
    assert (changed["parent_id"], changed["parent_kind"]) == (run["id"], "clone")
    assert (changed["rule"], changed["name"], changed["tags"]) == ("sfpo", "other", [])
    assert (changed["notes"], changed["priority"], changed["state"]) == (run["notes"], 3, "queued")
    bad = client.post(path, json={"overrides": ["learner.rule.k=1"]})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "config.learner.rule.k")
    assert client.post(f"{API}/runs/r0/clone").status_code == 404
    body = {"config": run["config"], "clone_of": run["id"]}
    taken = client.post(f"{API}/runs", json=body).raise_for_status().json()
    assert (taken["parent_id"], taken["parent_kind"]) == (run["id"], "clone")
    assert client.post(f"{API}/runs", json=body | {"clone_of": "r01none"}).status_code == 404


def test_retry_is_for_failed_and_cancelled_runs(client: TestClient, submit: Submit, lead_to: LeadTo) -> None:
    group = client.post(f"{API}/groups", json={"name": "g"}).json()
    run = submit(group=group["id"])
    for state in ("running", "succeeded"):
        lead_to(run["id"], state)
        assert client.post(f"{API}/runs/{run['id']}/retry").status_code == 409
    lead_to(run["id"], "failed")
    again = client.post(f"{API}/runs/{run['id']}/retry").raise_for_status().json()
    assert (again["parent_id"], again["parent_kind"], again["state"]) == (run["id"], "retry", "queued")
    assert (again["config"], again["group"]) == (run["config"], group["id"])


def test_progress_is_that_of_the_bound_nearest_to_its_end(
    client: TestClient, submit: Submit, database: Database, lead_to: LeadTo
) -> None:
    run = submit(overrides=["budget.steps=40", "budget.hours=1", "budget.tokens=1000", "budget.backward_passes=90"])
    lead_to(run["id"], "running")
    with database.writing() as session:
        row = find(session, Run, run["id"])
        row.step, row.backward_passes, row.tokens, row.training_s = 10, 30.0, 100.0, 1800.0
        name = MetricName(name="reward/mean")
        session.add(name)
        session.flush()
        session.add(MetricLast(run_number=row.number, name_number=name.number, last=0.25, last_step=10))
    detail = client.get(f"{API}/runs/{run['id']}").json()
    # steps 10/40, passes 30/90, tokens 100/1000, hours 0.5/1: the hour is nearest
    assert detail["progress"]["fraction"] == 0.5
    assert detail["progress"]["seconds_left"] == 1800.0
    assert detail["reward"] == 0.25
    stopping = client.post(f"{API}/runs/{run['id']}/cancel").json()
    assert stopping["progress"]["seconds_left"] is None


@pytest.mark.parametrize(("step", "training_s", "fraction", "left"), [(60, 0.0, 0.0, None), (110, 100.0, 0.1, 900.0)])
def test_a_warm_start_is_no_part_of_the_budget(
    step: int, training_s: float, fraction: float, left: float | None, client: TestClient, submit: Submit,
    database: Database,
) -> None:  # fmt: skip
    run = submit(overrides=["warm_start.steps=100", "learner.loss.kl_beta=0", "budget.steps=100"])
    runs.change(database, run["id"], state=RunState.RUNNING, step=step, training_s=training_s)
    shown = client.get(f"{API}/runs/{run['id']}").json()
    assert (shown["warm_steps"], shown["benchmarks"]) == (100, ["word_problems"])
    progress = shown["progress"]
    assert (progress["steps"], progress["step_budget"]) == (step, 200)
    # 10 of 100 steps in 100 s: 90 more take 900 s.
    assert (progress["fraction"], progress["seconds_left"]) == (fraction, left)


def test_a_time_left_beyond_all_numbers_is_unknown(database: Database) -> None:
    run_id = runs.add_run(database, state=RunState.RUNNING, step_budget=100_000, step=1, training_s=1e308)
    with database.reading() as session:
        (message,) = changes.messages(session, [find(session, Run, run_id).number]).values()
    pushed = json.loads(message.split(b"data: ")[1], parse_constant=pytest.fail)
    assert pushed["progress"]["seconds_left"] is None


@pytest.mark.parametrize(
    ("settings_now", "reason"),
    [
        ({"old_setting": 1}, "old_setting = 1: unknown setting"),
        ({"learner": {"rule": {"name": "my_rules:Gone"}}}, 'learner.rule.name = "my_rules:Gone": cannot be imported'),
    ],
)
def test_a_run_whose_config_is_no_longer_accepted_is_shown_edited_and_stopped(
    client: TestClient,
    submit: Submit,
    lead_to: LeadTo,
    database: Database,
    settings_now: dict[str, Any],
    reason: str,
) -> None:
    """As after an upgrade that drops a setting, or once its rule is no longer in GXPO_ALLOWED_PLUGINS."""
    group = add_group(database)
    ids = [submit(group=group)["id"] for _ in range(4)]
    for run_id in ids:
        lead_to(run_id, "running")
        runs.change(database, run_id, config=runs.get(database, run_id).config | settings_now)
    path = f"{API}/runs/{ids[0]}"
    shown = client.get(path)
    assert (shown.status_code, shown.json()["cost"]["backward_passes"]) == (200, None)
    assert reason in shown.json()["cost"]["formula"]
    edited = client.patch(path, json={"notes": "n"}, headers={"If-Match": shown.headers["etag"]})
    assert (edited.status_code, edited.json()["notes"]) == (200, "n")
    for query in ("/runs", f"/groups/{group}", f"/runs/{ids[0]}/headline", f"/export?runs={ids[0]}&parts=runs"):
        assert client.get(f"{API}{query}").status_code == 200, query
    assert client.post(f"{path}/cancel").json()["state"] == "cancelling"
    asked = {"action": "pause", "runs": ids[1:3]}
    acted = client.post(f"{API}/runs/actions", json=asked).raise_for_status().json()["items"]
    assert [item["state"] for item in acted] == ["pausing"] * 2
    assert client.post(f"{API}/groups/{group}/cancel").json()["by_state"] == {"cancelling": 4}
    refused = client.post(f"{path}/clone")
    assert (refused.status_code, reason.partition(":")[0].partition(" ")[0] in refused.text) == (422, True)


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer, and snapshots
def test_what_is_deleted_between_two_statements_is_missing(
    client: TestClient, submit: Submit, lead_to: LeadTo, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(path: str, module: Any, name: str, *, read_before: bool = False) -> None:
        """Delete what is at `path` while this function, of an endpoint's statements, is called the next time."""
        read = getattr(module, name)

        def with_deletion(*given: Any) -> Any:
            monkeypatch.undo()
            before = read(*given) if read_before else None
            client.delete(path).raise_for_status()
            return before if read_before else read(*given)

        monkeypatch.setattr(module, name, with_deletion)

    launched = reporting.launch(database)
    ended = launched.split()[0]
    reporting.send(database, launched, reporting.body(1, samples=[reporting.sample_row(1)]))
    lead_to(ended, "succeeded")
    meanwhile(f"{API}/runs/{ended}", samples, "group_counts")
    page = client.get(f"{API}/runs/{ended}/samples")
    assert (page.status_code, len(page.json()["items"]), page.json()["groups"]) == (200, 1, [])

    run_id = submit()["id"]
    lead_to(run_id, "succeeded")
    meanwhile(f"{API}/runs/{run_id}", service, "views")
    assert client.get(f"{API}/runs/{run_id}/headline").status_code == 404

    group = add_group(database)
    meanwhile(f"{API}/groups/{group}", endpoints, "_group", read_before=True)
    refused = client.post(f"{API}/runs", json=BODY | {"group": group})
    assert (refused.status_code, f"there is no group {group}" in refused.json()["detail"]) == (404, True)

    group = add_group(database)
    failed = submit(group=group)["id"]
    lead_to(failed, "failed")
    meanwhile(f"{API}/groups/{group}", service, "check_queue")
    assert client.post(f"{API}/runs/{failed}/retry").status_code == 404
    assert client.post(f"{API}/runs/{failed}/retry").json()["group"] is None


def test_a_tokens_key_and_body_make_one_run_and_another_body_is_refused(
    client: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post(f"{API}/runs", json=BODY, headers=headers)
    again = client.post(f"{API}/runs", json=BODY, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    other = client.post(f"{API}/runs", json={**BODY, "name": "other"}, headers=headers)
    assert other.status_code == 409
    assert client.post(f"{API}/runs/{first.json()['id']}/clone", json={}, headers=headers).status_code == 409
    assert client.post(f"{API}/groups", json={"name": "g"}, headers=headers).status_code == 409
    assert runs.count(database, Run) == 1
    for bad in ("", "a b", "x" * 201, "\t"):
        assert client.post(f"{API}/runs", json=BODY, headers={"Idempotency-Key": bad}).status_code == 422, bad
    mine = first.json()["id"]
    other = client.post(f"{API}/runs", json=BODY, headers=headers | bearer(token_for("submitter")))
    assert (other.status_code, other.json()["id"] == mine) == (201, False)
    client.post(f"{API}/runs/{mine}/cancel")
    assert client.delete(f"{API}/runs/{mine}").status_code == 204
    assert client.post(f"{API}/runs", json=BODY, headers=headers).status_code == 410, "a key outlives its run"


def test_clone_retry_group_and_sweep_take_keys_too(client: TestClient, submit: Submit, lead_to: LeadTo) -> None:
    run = submit()
    lead_to(run["id"], "failed")
    sweep = {"name": "s", "base": {"preset": "demo"}, "seeds": [0, 1]}
    of_run = {f"/runs/{run['id']}/clone": {}, f"/runs/{run['id']}/retry": None}
    for path, body in (of_run | {"/groups": {"name": "g"}, "/sweeps": sweep}).items():
        headers = {"Idempotency-Key": path}
        first, again = (client.post(f"{API}{path}", json=body, headers=headers) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200), path
        assert first.json() == again.json()


def test_fifty_submissions_at_once_with_one_key_make_one_run(client: TestClient, database: Database) -> None:
    start = threading.Barrier(50)

    def one(_: int) -> tuple[int, str]:
        start.wait()
        answer = client.post(f"{API}/runs", json=BODY, headers={"Idempotency-Key": "fifty"})
        return answer.status_code, answer.json().get("id", answer.text)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(one, range(50)))
    statuses = [status for status, _ in answers]
    assert sorted(statuses) == [200] * 49 + [201], answers
    assert len({run_id for _, run_id in answers}) == 1
    assert runs.count(database, Run) == 1
    assert runs.count(database, RunTag) == 2


def folder_of(settings: ServiceSettings, run_id: str) -> Path:
    folder = settings.artifacts / run_id
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_only_a_run_that_has_ended_is_deleted_with_rows_and_files(
    client: TestClient, submit: Submit, lead_to: LeadTo, settings: ServiceSettings, database: Database
) -> None:
    run = submit()
    path, folder = f"{API}/runs/{run['id']}", folder_of(settings, run["id"])
    for state in ("queued", "running", "paused", "cancelling"):
        lead_to(run["id"], state)
        assert (client.delete(path).status_code, folder.is_dir()) == (409, True), state
    lead_to(run["id"], "failed")
    assert (client.delete(path).status_code, folder.exists()) == (204, False)
    assert [client.get(path).status_code, client.delete(path).status_code] == [404, 404]
    assert (runs.count(database, Run), runs.count(database, RunTag)) == (0, 0)
    with database.reading() as session:
        kinds = list(session.scalars(select(Event.kind).order_by(Event.number)))
        assert kinds == ["token_created", "run_deleted"]


def test_deleting_follows_no_link(
    client: TestClient, submit: Submit, settings: ServiceSettings, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    inner, whole = submit(), submit()
    folder = folder_of(settings, inner["id"])
    (folder / "link").symlink_to(outside)
    (folder / "checkpoints" / "file").symlink_to(outside / "precious")
    (settings.artifacts / whole["id"]).symlink_to(outside)
    for run in (inner, whole):
        client.post(f"{API}/runs/{run['id']}/cancel")
        assert client.delete(f"{API}/runs/{run['id']}").status_code == 204
    assert (outside / "precious").read_text() == "x"
    assert list(settings.artifacts.iterdir()) == []


def test_files_go_only_with_the_commit_of_the_deletion_and_at_the_latest_at_the_next_start(
    app: FastAPI, database: Database, settings: ServiceSettings
) -> None:
    kept, deleted = (runs.add_run(database, state=RunState.FAILED) for _ in range(2))
    folders = [folder_of(settings, run_id) for run_id in (kept, deleted)]
    admin = Principal("t0", "admin", Role.ADMIN)

    def deleted_but_not_committed() -> None:
        with database.writing() as session:
            service.delete(session, find(session, Run, kept, lock=True), admin)
            raise OSError("the disk of the database is full")

    with pytest.raises(OSError, match="disk of the database"):
        deleted_but_not_committed()
    with database.writing() as session:
        service.delete(session, find(session, Run, deleted, lock=True), admin)
    assert all(folder.is_dir() for folder in folders), "as after a kill behind the commit"
    with TestClient(app):
        assert [folder.is_dir() for folder in folders] == [True, False]
