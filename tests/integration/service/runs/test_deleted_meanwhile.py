"""Runs that are deleted between the queries of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session
from support import queued_runs as runs
from support.change_reader import Reader
from support.reporting import body, launch, metric_row, post

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.runs import listing, service

pytestmark = pytest.mark.each_database

API = "/api/v1"
Delete = Callable[[str], None]


@pytest.fixture
def delete_meanwhile(database: Database, monkeypatch: pytest.MonkeyPatch) -> Delete:
    """Deletes a run in another connection just before the next request reads its row."""
    read = listing.list_rows
    deleted_next: list[str] = []

    def list_rows(session: Session, numbers: Sequence[int]) -> list[dict[str, Any]]:
        while deleted_next:
            with database.writing() as other:
                other.delete(service.find(other, deleted_next.pop()))
        return read(session, numbers)

    monkeypatch.setattr(listing, "list_rows", list_rows)
    return deleted_next.append


@pytest.mark.parametrize("path", ["/runs?sort=created_at&order=asc", "/runs?sort=metric:reward/mean&order=asc"])
def test_a_list_leaves_it_out(path: str, client: TestClient, database: Database, delete_meanwhile: Delete) -> None:
    first, second, third = (runs.add_run(database, state=RunState.FAILED) for _ in range(3))
    delete_meanwhile(second)
    answer = client.get(f"{API}{path}")
    assert answer.status_code == 200, answer.text
    # Queries see one snapshot on SQLite, the latest state on PostgreSQL.
    expected = [first, second, third] if database.is_sqlite else [first, third]
    assert sorted(run["id"] for run in answer.json()["items"]) == sorted(expected)
    assert sorted(run["id"] for run in client.get(f"{API}{path}").json()["items"]) == sorted([first, third])


def test_a_value_stays_with_its_run(client: TestClient, database: Database, delete_meanwhile: Delete) -> None:
    ids = []
    for value in (1.0, 2.0, 3.0):
        mine = launch(database)
        assert post(client, mine, body(1, metrics=[metric_row(1, a=value)])).status_code == 200
        ids.append(mine.split()[0])
        runs.change(database, ids[-1], state=RunState.FAILED)
    delete_meanwhile(ids[0])
    items = client.get(f"{API}/runs?sort=metric:a&order=asc").json()["items"]
    shown = {run["id"]: run["metrics"]["a"] for run in items}
    assert {run_id: shown[run_id] for run_id in ids[1:]} == {ids[1]: 2.0, ids[2]: 3.0}


def test_a_single_run_is_not_found(client: TestClient, database: Database, delete_meanwhile: Delete) -> None:
    run_id = runs.add_run(database, state=RunState.FAILED)
    delete_meanwhile(run_id)
    assert client.get(f"{API}/runs/{run_id}").status_code == (200 if database.is_sqlite else 404)
    assert client.get(f"{API}/runs/{run_id}").status_code == 404


def test_a_stream_goes_on(database: Database, delete_meanwhile: Delete, token_for: Callable[[str], str]) -> None:
    gone, kept = (runs.add_run(database, state=RunState.FAILED) for _ in range(2))

    async def test() -> None:
        reader = Reader(database, token_for("viewer"), [runs.get(database, run_id).number for run_id in (gone, kept)])
        delete_meanwhile(gone)
        (message,) = await reader.read()
        assert kept.encode() in message
        (deleted,) = await reader.read()
        assert b"event: deleted" in deleted
        assert gone.encode() in deleted

    anyio.run(test)
