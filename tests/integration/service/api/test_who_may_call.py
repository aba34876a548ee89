"""Every call of the API's description, asked by those who may not: nobody, and each role above its right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import select
from support.reporting import launch

from gxpo_services.db.database import Database
from gxpo_services.db.tables import metadata

OPEN = {"/health/live", "/health/ready"}
INGEST = ("post", "/api/v1/runs/{run_id}/ingest")
"""For the token of a launch alone."""
FOR_ADMINS = {"/api/v1/tokens", "/api/v1/audit"}
NOBODY = ({}, {"Authorization": "Bearer gxpo_wrong"}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"})


def calls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of everything that is described."""
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            yield method, path


def ask(client: TestClient, method: str, path: str, run_id: str, headers: dict[str, str]) -> Any:
    url = path.format(run_id=run_id, group_id=f"g{run_id[1:]}", token_id="t1", step=1)
    content = {} if method in ("post", "patch") else None
    return client.request(method, url, headers=headers, params={"names": "a"}, json=content)


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """All rows by table, without the last uses of tokens, which are written from time to time."""
    columns = {table.name: [c for c in table.columns if c.key != "last_used_at"] for table in metadata.sorted_tables}
    with database.engine.connect() as connection:
        return {name: [tuple(row) for row in connection.execute(select(*chosen))] for name, chosen in columns.items()}


def test_nobody_without_a_token_reads_or_writes_anything_but_the_health(
    app: FastAPI, anonymous: TestClient, database: Database
) -> None:
    run_id = launch(database).split()[0]
    before = everything(database)
    asked = [(method, path) for method, path in calls(app) if path not in OPEN]
    assert len(asked) > 30
    for method, path in asked:
        for headers in NOBODY:
            answer = ask(anonymous, method, path, run_id, headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            assert answer.headers["content-type"] == "application/problem+json"
            assert run_id not in answer.text
    assert everything(database) == before
    assert {path for path in OPEN if anonymous.get(path).status_code == 200} == OPEN


def test_a_token_for_metrics_reads_metrics_and_nothing_else(
    app: FastAPI, anonymous: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    run_id = launch(database).split()[0]
    scraper = {"Authorization": f"Bearer {token_for('metrics')}"}
    assert anonymous.get("/metrics", headers=scraper).status_code == 200
    for method, path in calls(app):
        if path not in {*OPEN, "/metrics"}:
            answer = ask(anonymous, method, path, run_id, scraper)
            assert answer.status_code == (401 if (method, path) == INGEST else 403), (method, path)
            assert run_id not in answer.text


def test_a_viewer_reads_what_exists_and_changes_nothing_and_a_submitter_no_tokens(
    app: FastAPI, anonymous: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    run_id = launch(database).split()[0]
    viewer, submitter = ({"Authorization": f"Bearer {token_for(role)}"} for role in ("viewer", "submitter"))
    for headers, role in ((viewer, "viewer"), (submitter, "submitter")):
        assert anonymous.get("/api/v1/tokens/me", headers=headers).json()["role"] == role
    before = everything(database)
    for method, path in calls(app):
        if method == "get" and "{run_id}" in path:
            assert ask(anonymous, method, path, "r" + "0" * 20, viewer).status_code == 404, path
        if path.endswith("/stream"):
            continue  # lasts as long as its run
        answer = ask(anonymous, method, path, run_id, viewer)
        if method != "get" or path in FOR_ADMINS:
            assert answer.status_code == (401 if (method, path) == INGEST else 403), (method, path)
        else:
            assert answer.status_code in (200, 404, 422), path
        if path.startswith("/api/v1/tokens") and path != "/api/v1/tokens/me":
            assert ask(anonymous, method, path, run_id, submitter).status_code == 403, (method, path)
    assert ask(anonymous, *INGEST, run_id, submitter).status_code == 401
    assert everything(database) == before
