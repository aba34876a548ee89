"""What one token may take of the service: queued runs, priority, streams, exports and comparisons."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support import queued_runs as runs
from support.reported_runs import config, evaluated_run
from support.service_processes import until

from gxpo_services.api.dependencies import Slots
from gxpo_services.compare import endpoints
from gxpo_services.db.database import Database
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli

API = "/api/v1"
DEMO = {"preset": "demo"}


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"max_queued_per_user": 3})


def test_a_token_has_so_many_queued_runs_and_no_more(
    client: TestClient, anonymous: TestClient, token_for: Callable[[str], str]
) -> None:
    first = client.post(f"{API}/runs", json=DEMO).json()["id"]
    sweep = {"name": "s", "base": DEMO, "seeds": [0, 1, 2]}
    refused = client.post(f"{API}/sweeps", json=sweep)
    assert (refused.status_code, refused.json()["type"]) == (429, "/api/v1/problems#limit-reached")
    assert "GXPO_MAX_QUEUED_PER_USER = 3" in refused.json()["detail"]
    assert client.get(f"{API}/groups").json()["items"] == [], "all of it or nothing"
    assert client.post(f"{API}/sweeps", json=sweep | {"seeds": [0, 1]}).status_code == 201
    key = {"Idempotency-Key": "k"}
    for path in ("/runs", f"/runs/{first}/clone"):
        assert client.post(f"{API}{path}", json=DEMO if path == "/runs" else {}, headers=key).status_code == 429, path
    other = {"Authorization": f"Bearer {token_for('submitter')}"}
    assert anonymous.post(f"{API}/runs", json=DEMO, headers=other).status_code == 201
    client.post(f"{API}/runs/{first}/cancel")
    assert client.post(f"{API}/runs", json=DEMO, headers=key).status_code == 201, "the refused request used no key"
    assert client.post(f"{API}/runs/{first}/retry").status_code == 429


def test_only_admins_raise_priority(client: TestClient, anonymous: TestClient, token_for: Callable[[str], str]) -> None:
    mine = {"Authorization": f"Bearer {token_for('submitter')}"}
    for path, body in (("/runs", DEMO), ("/sweeps", {"name": "s", "base": DEMO})):
        refused = anonymous.post(f"{API}{path}", json=body | {"priority": 1}, headers=mine)
        assert (refused.status_code, "only an admin" in refused.json()["detail"]) == (403, True), path
    low = anonymous.post(f"{API}/runs", json=DEMO | {"priority": -5}, headers=mine).json()
    assert low["priority"] == -5
    urgent = client.post(f"{API}/runs", json=DEMO | {"priority": 7}).json()["id"]
    assert anonymous.patch(f"{API}/runs/{urgent}", json={"priority": 8}, headers=mine).status_code == 403
    kept = anonymous.patch(f"{API}/runs/{urgent}", json={"priority": 7, "notes": "n"}, headers=mine)
    assert kept.status_code == 200, "nothing is raised"
    assert anonymous.post(f"{API}/runs/{urgent}/clone", json={"priority": 7}, headers=mine).status_code == 403
    assert anonymous.post(f"{API}/runs/{urgent}/clone", headers=mine).json()["priority"] == 0
    assert client.post(f"{API}/runs/{urgent}/clone").json()["priority"] == 7


@pytest.fixture
def served(app: FastAPI, url: str) -> str:
    app.state.stream_slots = Slots("streams", total=2, each=1)
    app.state.export_slots = Slots("exports", total=1, each=1)
    return url


def test_streams_are_limited_by_token_and_all(served: str, database: Database, token_for: Callable[[str], str]) -> None:
    path = f"{served}{API}/runs/{runs.add_run(database, state=RunState.RUNNING)}/logs/stream"
    first, second, third = ({"Authorization": f"Bearer {token_for('viewer')}"} for _ in range(3))
    with httpx.Client(timeout=30.0, trust_env=False) as http, ExitStack() as opened:

        def status(headers: dict[str, str]) -> int:
            with http.stream("GET", path, headers=headers) as response:
                return response.status_code

        def hold(headers: dict[str, str]) -> ExitStack:
            mine = opened.enter_context(ExitStack())
            response = mine.enter_context(http.stream("GET", path, headers=headers))
            assert response.status_code == 200
            pieces = response.iter_raw()
            next(pieces)
            mine.callback(pieces.close)  # keeps it alive: the end of the iterator is that of the response
            return mine

        one = hold(first)
        assert status(first) == 429, "one of a token"
        hold(second)
        assert status(third) == 429, "two altogether"
        one.close()
        until(lambda: status(third) == 200, "the slot of a closed stream is free")


def test_exports_are_limited(served: str, app: FastAPI, database: Database, token_for: Callable[[str], str]) -> None:
    run_id = runs.add_run(database)
    headers = {"Authorization": f"Bearer {token_for('viewer')}"}
    with httpx.Client(timeout=30.0, trust_env=False, headers=headers) as http:
        url = f"{served}{API}/export?runs={run_id}&parts=runs"
        with app.state.export_slots.holding("another token"):
            refused = http.get(url)
        assert (refused.status_code, refused.headers["content-type"]) == (429, "application/problem+json")
        assert [http.get(url).status_code for _ in range(3)] == [200, 200, 200], "each gives its slot back"


def test_no_viewer_keeps_the_comparisons_of_others_waiting(
    url: str, database: Database, token_for: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first viewer's comparisons are held open: as many as it may have wait, the rest is refused at once."""
    run_id = evaluated_run(database, config({"name": "grpo"}), {0: [0.5], 1: [1.0]})
    first, second = ({"Authorization": f"Bearer {token_for('viewer')}"} for _ in range(2))
    go_on = threading.Event()
    in_worker = endpoints.in_worker

    async def held(*given: Any) -> bytes:
        await anyio.to_thread.run_sync(go_on.wait)
        return await in_worker(*given)

    monkeypatch.setattr(endpoints, "in_worker", held)
    allowed, extra = 4, 3
    with httpx.Client(timeout=60.0, trust_env=False) as http, ThreadPoolExecutor(12) as pool:

        def status(headers: dict[str, str]) -> int:
            return http.get(f"{url}{API}/compare?runs={run_id}", headers=headers).status_code

        try:
            asked = [pool.submit(status, first) for _ in range(allowed + extra)]
            until(lambda: sum(one.done() for one in asked) == extra, "the rest is refused while the others wait")
            assert [one.result() for one in asked if one.done()] == [429] * extra
            other = pool.submit(status, second)
            assert status({"Authorization": "Bearer gxpo_wrong"}) == 401, "without waiting for its turn"
        finally:
            go_on.set()
        assert other.result() == 200
        assert sorted(one.result() for one in asked) == [200] * allowed + [429] * extra
        assert status(first) == 200, "the slots are free again"


@pytest.mark.parametrize("command", ["serve", "scheduler"])
@pytest.mark.parametrize(("name", "value"), [("GXPO_HOST", "0.0.0.0"), ("GXPO_PUBLIC_URL", "http://gxpo.example:8000")])
def test_a_service_that_others_reach_does_not_start_without_roots(
    command: str, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for variable, content in ((name, value), ("GXPO_HOME", str(tmp_path / "home")), ("GXPO_DATA_ROOTS", '["/data"]')):
        monkeypatch.setenv(variable, content)
    assert cli.main([command]) == 2
    assert "GXPO_MODEL_ROOTS" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_service_on_a_used_port_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GXPO_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
    reason = "Address already in use"
    told = f"gxpo: cannot listen on 127.0.0.1, port {port} ({reason}); choose another with --port or --host\n"
    assert capsys.readouterr().err == told
    assert not (tmp_path / "home").exists()
