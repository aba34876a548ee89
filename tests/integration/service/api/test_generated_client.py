"""A client that a public generator makes from the OpenAPI description leads a run through its whole life."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fastapi import FastAPI
from support import reporting
from support.finished_runs import finish
from support.http_server import HttpServer

from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState

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


def test_every_operation_has_a_name_of_its_domain(routes: FastAPI) -> None:
    names = [operation["operationId"] for path in routes.openapi()["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    assert {"runs_submit", "runs_pause", "runs_list", "tokens_me", "health_ready"} <= set(names)


def test_a_generated_client_submits_watches_pauses_resumes_compares_and_exports(
    generated: Import, app: FastAPI, database: Database, token_for: Callable[[str], str]
) -> None:
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
            finish(url, database, run_id, accuracies)
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
