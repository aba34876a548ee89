"""Groups are cancelled, renamed and deleted as a whole; one action on many runs; runs of an owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support import queued_runs as runs
from support.scheduling import write_outcome

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings

API = "/api/v1"


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


def test_one_action_says_of_each_run_what_became_of_it(
    client: TestClient, database: Database, sweep: tuple[str, list[str]]
) -> None:
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


def test_runs_of_an_owner(client: TestClient, anonymous: TestClient, token_for: Callable[[str], str]) -> None:
    mine = {"Authorization": f"Bearer {token_for('submitter')}"}
    run_id = anonymous.post(f"{API}/runs", json={"preset": "demo"}, headers=mine).json()["id"]
    client.post(f"{API}/runs", json={"preset": "demo"})
    page = client.get(f"{API}/runs", params={"owner": "submitter"}).json()
    assert ([run["id"] for run in page["items"]], page["total"]) == ([run_id], 1)
    assert client.get(f"{API}/runs", params={"owner": "nobody"}).json()["items"] == []
