"""Sweeps and groups over HTTP: submitted, listed, cancelled, renamed, deleted as a whole; one action on many runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select
from support import queued_runs as runs
from support.paging import walk
from support.scheduling import write_outcome

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event, Group, Run
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings
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


def count(database: Database, table: type) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_a_sweep_queues_all_its_runs_as_one_group(client: TestClient, database: Database) -> None:
    planned = client.post(f"{API}/sweeps/validate", json=SWEEP).json()
    assert count(database, Run) == 0
    answer = client.post(f"{API}/sweeps", json=SWEEP)
    assert answer.status_code == 201
    made = answer.json()
    # 2 values × 3 seeds of 10 steps with 3 passes
    assert made["cost"] == planned["cost"]
    assert (made["cost"]["runs"], made["cost"]["steps"], made["cost"]["backward_passes"]) == (6, 60, 180)
    assert [run["name"] for run in made["runs"]] == [run["name"] for run in planned["runs"]]
    assert [run["group_values"] for run in made["runs"]] == [run["group_values"] for run in planned["runs"]]
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


def test_a_group_shows_its_request_runs_and_states(client: TestClient) -> None:
    made = client.post(f"{API}/sweeps", json=SWEEP)
    group = client.get(made.headers["location"]).json()
    assert group["spec"]["grid"] == SWEEP["grid"]
    assert group["by_state"] == {"queued": 6}
    assert [run["id"] for run in group["runs"]] == [run["id"] for run in made.json()["runs"]]
    client.post(f"{API}/runs/{group['runs'][0]['id']}/cancel")
    again = client.get(f"{API}/groups/{group['id']}").json()
    assert again["by_state"] == {"queued": 5, "cancelled": 1}
    assert again["num_runs"] == 6
    assert client.get(f"{API}/groups/g0").status_code == 404


def test_groups_come_newest_first_in_pages(client: TestClient) -> None:
    ids = [client.post(f"{API}/groups", json={"name": f"g{n}"}).json()["id"] for n in range(5)]
    assert [group["id"] for group in walk(client, "/groups", limit=2)] == ids[::-1]
    cursor = client.get(f"{API}/groups", params={"limit": 2}).json()["next_cursor"]
    assert client.get(f"{API}/runs", params={"cursor": cursor}).status_code == 422


def test_a_sweep_with_one_bad_run_makes_nothing(client: TestClient, database: Database) -> None:
    bad = SWEEP | {"grid": {"learner.rule.alpha": [0.1, 7], "x.y": [1]}}
    planned = client.post(f"{API}/sweeps/validate", json=bad)
    assert planned.status_code == 200
    assert not planned.json()["valid"]
    answer = client.post(f"{API}/sweeps", json=bad)
    assert answer.status_code == 422
    assert answer.json()["errors"] == planned.json()["errors"]
    assert {error["field"] for error in answer.json()["errors"]} == {"grid.x.y"}
    assert (count(database, Run), count(database, Group)) == (0, 0)


def test_the_catalogue(client: TestClient) -> None:
    schema = client.get(f"{API}/schema").json()
    assert schema == RunConfig.model_json_schema()
    presets = {preset["name"]: preset for preset in client.get(f"{API}/presets").json()}
    assert sorted(presets) == preset_names()
    for name, preset in presets.items():
        wanted = load_preset(name)
        assert RunConfig.model_validate(preset["config"]) == wanted
        valid = client.post(f"{API}/runs/validate", json={"toml": preset["toml"]}).json()
        assert valid["config"] == preset["config"]
        assert preset["summary"]
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


def audit(client: TestClient, kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = client.get(f"{API}/audit", params={"kind": kind}).json()["items"]
    return entries


def test_a_group_is_cancelled_as_a_whole_and_twice_is_once(
    client: TestClient, database: Database, sweep: tuple[str, list[str]]
) -> None:
    group, ids = sweep
    runs.change(database, ids[0], state=RunState.SUCCEEDED)
    runs.change(database, ids[1], state=RunState.RUNNING)
    for _ in range(2):
        answer = client.post(f"{API}/groups/{group}/cancel")
        assert (answer.status_code, answer.json()["by_state"]) == (
            200,
            {"succeeded": 1, "cancelling": 1, "cancelled": 1},
        )
    assert len(audit(client, "group_cancelled")) == 1
    assert client.post(f"{API}/groups/g0/cancel").status_code == 404


def test_a_rename_with_if_match_and_its_audit(client: TestClient, sweep: tuple[str, list[str]]) -> None:
    path = f"{API}/groups/{sweep[0]}"
    tag = client.get(path).headers["etag"]
    first = client.patch(path, json={"name": "new"}, headers={"If-Match": tag})
    assert (first.status_code, first.json()["name"]) == (200, "new")
    assert client.get(path).headers["etag"] == first.headers["etag"] != tag
    assert client.patch(path, json={"name": "late"}, headers={"If-Match": tag}).status_code == 412
    assert client.get(path).json()["name"] == "new"
    assert [entry["message"] for entry in audit(client, "group_renamed")] == ["group 's' was renamed to 'new'"]
    for bad in ({}, {"name": ""}, {"name": None}, {"kind": "study"}):
        assert client.patch(path, json=bad).status_code == 422


def test_a_deleted_group_keeps_its_runs_or_takes_those_that_ended(
    client: TestClient, settings: ServiceSettings, sweep: tuple[str, list[str]]
) -> None:
    group, ids = sweep
    refused = client.delete(f"{API}/groups/{group}", params={"runs": "delete"})
    assert refused.status_code == 409, "queued runs"
    assert client.get(f"{API}/groups/{group}").json()["num_runs"] == 3
    assert client.delete(f"{API}/groups/{group}").status_code == 204
    assert client.get(f"{API}/groups/{group}").status_code == 404
    assert [client.get(f"{API}/runs/{run_id}").json()["group"] for run_id in ids] == [None] * 3

    made = client.post(f"{API}/sweeps", json={"name": "t", "base": {"preset": "demo"}}).json()
    run_id = made["runs"][0]["id"]
    client.post(f"{API}/runs/{run_id}/cancel")
    (settings.artifacts / run_id).mkdir(parents=True)
    write_outcome(settings, run_id, 1, "cancelled")
    assert client.delete(f"{API}/groups/{made['group']['id']}", params={"runs": "delete"}).status_code == 204
    assert client.get(f"{API}/runs/{run_id}").status_code == 404
    assert not (settings.artifacts / run_id).exists()


def test_others_delete_no_group(
    client: TestClient, anonymous: TestClient, token_for: Callable[[str], str], sweep: tuple[str, list[str]]
) -> None:
    other = {"Authorization": f"Bearer {token_for('submitter')}"}
    assert anonymous.delete(f"{API}/groups/{sweep[0]}", headers=other).status_code == 403
    mine = anonymous.post(f"{API}/groups", json={"name": "mine"}, headers=other).json()["id"]
    assert anonymous.delete(f"{API}/groups/{mine}", headers=other).status_code == 204


def test_an_action_answers_for_each_run(client: TestClient, database: Database, sweep: tuple[str, list[str]]) -> None:
    ids = sweep[1]
    runs.change(database, ids[1], state=RunState.SUCCEEDED)

    def act(action: str, wanted: list[str]) -> list[tuple[str, str | None, int | None]]:
        answer = client.post(f"{API}/runs/actions", json={"action": action, "runs": wanted})
        assert answer.status_code == 200, answer.text
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
