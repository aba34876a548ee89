"""Every call of the API's description, asked by those who may not: nobody, and each role above its right."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support import queued_runs, reporting
from support.http_server import HttpServer
from support.reported_runs import finish
from support.reporting import launch

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState

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
    params = {"names": "a"} if path.endswith("/metrics") else None
    return client.request(method, url, headers=headers, params=params, json=content)


def everything(database: Database) -> dict[str, list[dict[str, Any]]]:
    """All rows by table, without the last uses of tokens, which are written from time to time."""
    rows = queued_runs.all_rows(database.engine)
    return rows | {"tokens": [token | {"last_used_at": None} for token in rows["tokens"]]}


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


def test_a_token_for_metrics_reads_those_a_viewer_what_exists_and_changes_nothing_and_a_submitter_no_tokens(
    app: FastAPI, anonymous: TestClient, database: Database, token_for: Callable[[str], str]
) -> None:
    run_id = launch(database).split()[0]
    roles = ("metrics", "viewer", "submitter")
    scraper, viewer, submitter = ({"Authorization": f"Bearer {token_for(role)}"} for role in roles)
    assert anonymous.get("/metrics", headers=scraper).status_code == 200
    for headers, role in ((viewer, "viewer"), (submitter, "submitter")):
        assert anonymous.get("/api/v1/tokens/me", headers=headers).json()["role"] == role
    before = everything(database)
    for method, path in calls(app):
        refusal = 401 if (method, path) == INGEST else 403
        if path not in {*OPEN, "/metrics"}:
            answer = ask(anonymous, method, path, run_id, scraper)
            assert answer.status_code == refusal, (method, path)
            assert run_id not in answer.text
        if method == "get" and "{run_id}" in path:
            assert ask(anonymous, method, path, "r" + "0" * 20, viewer).status_code == 404, path
        if path.endswith("/stream"):
            continue  # lasts as long as its run
        answer = ask(anonymous, method, path, run_id, viewer)
        if method != "get" or path in FOR_ADMINS:
            assert answer.status_code == refusal, (method, path)
        else:
            assert answer.status_code in (200, 404, 422), path
        if path.startswith("/api/v1/tokens") and path != "/api/v1/tokens/me":
            assert ask(anonymous, method, path, run_id, submitter).status_code == 403, (method, path)
    assert ask(anonymous, *INGEST, run_id, submitter).status_code == 401
    assert everything(database) == before


# A client that a public generator makes from the OpenAPI description leads a run through its whole life.
PACKAGE = "generated_gxpo_client"
Import = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def generated(routes: FastAPI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Import]:
    """Imports modules of the generated package."""
    pytest.importorskip("openapi_python_client", reason="openapi-python-client is not installed (requirements/dev.txt)")
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(json.dumps(routes.openapi()), encoding="utf-8")
    (folder / "settings.yml").write_text("post_hooks: []\n", encoding="utf-8")
    words = ["generate", "--meta", "none", "--path", "openapi.json", "--config", "settings.yml"]
    subprocess.run(
        [str(Path(sys.executable).with_name("openapi-python-client")), *words, "--output-path", PACKAGE],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    sys.path.insert(0, str(folder))
    yield lambda name: importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)
    sys.path.remove(str(folder))


def test_a_generated_client_submits_watches_pauses_resumes_compares_and_exports(
    generated: Import, app: FastAPI, database: Database, token_for: Callable[[str], str]
) -> None:
    names = [operation["operationId"] for path in app.openapi()["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    models = generated("models")
    runs = {name: generated(f"api.runs.runs_{name}") for name in ("submit", "get", "pause", "resume", "list")}
    with HttpServer(app) as url:
        client = generated("").AuthenticatedClient(base_url=url, token=token_for("submitter"))
        ids = []
        for rule in ("grpo", "gxpo"):
            request = models.RunRequest.from_dict(
                {"preset": "demo", "name": rule, "overrides": [f"learner.rule.name={rule}"]}
            )
            made = runs["submit"].sync(client=client, body=request, idempotency_key=f"key-{rule}")
            again = runs["submit"].sync(client=client, body=request, idempotency_key=f"key-{rule}")
            assert made.id == again.id
            ids.append(made.id)
        first = ids[0]
        assert runs["get"].sync(run_id=first, client=client).state == "queued"
        launched = reporting.launch(database, first)
        reporting.send(database, launched, reporting.body(None))
        assert runs["get"].sync(run_id=first, client=client).state == "running"
        assert runs["pause"].sync(run_id=first, client=client).state == "pausing"
        paused = {"attempt": 1, "outcome": "paused", "message": "", "time": 1.0}
        reporting.send(database, launched, reporting.body(1, outcome=paused))
        assert runs["get"].sync(run_id=first, client=client).state == "paused"
        assert runs["resume"].sync(run_id=first, client=client).state == "queued"
        for run_id, accuracies in zip(ids, ([0.0, 0.25, 0.5], [0.0, 0.5, 0.75]), strict=True):
            finish(database, run_id, accuracies)
        listed = runs["list"].sync(client=client, state=[models.RunState(RunState.SUCCEEDED.value)])
        assert {run.id for run in listed.items} == set(ids)
        compared = generated("api.comparisons.comparisons_compare_runs").sync(client=client, runs=ids)
        assert compared.target.accuracy == 0.5, "the peak of GRPO"
        exported = generated("api.comparisons.comparisons_export_runs").sync_detailed(
            client=client, runs=ids, parts=[models.ComparisonsExportRunsPartsItem("metrics")]
        )
        assert exported.content.decode().count("\r\n") == 1 + 2 * 2 * 4
        bad = runs["submit"].sync(client=client, body=models.RunRequest.from_dict({"preset": "none"}))
        assert isinstance(bad, models.ProblemDetails)
        assert bad.errors
