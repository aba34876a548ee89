"""Requests that no honest client sends, over sockets, to the protocol of `gxpo serve` and to uvicorn with httptools."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from support import queued_runs as runs
from support.http_server import HttpServer, received
from support.reporting import body, launch, metric_row, post

from gxpo_services import logging as logs
from gxpo_services.api import errors
from gxpo_services.api.errors import Problem
from gxpo_services.app import create_app
from gxpo_services.db.database import Database
from gxpo_services.settings import ServiceSettings

# What is refused here never reaches a database: one kind is enough.
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

API = "/api/v1"
LIMIT = 2048


@pytest.fixture
def max_body_s(settings: ServiceSettings) -> float:
    return settings.max_body_s


@pytest.fixture(params=["own", "httptools"])
def address(request: pytest.FixtureRequest, settings: ServiceSettings, max_body_s: float) -> Iterator[tuple[str, int]]:
    """An API whose bodies end at LIMIT bytes."""
    limited = settings.model_copy(update={"max_body_bytes": LIMIT, "max_body_s": max_body_s})
    with HttpServer(create_app(limited), request.param) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


def raw(address: tuple[str, int], *parts: bytes) -> tuple[int, bytes]:
    """Status and all bytes of what is answered until the server closes the connection."""
    with socket.create_connection(address, timeout=60) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break  # refused already
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer.split()[1]), answer


def head(secret: str, *more: str) -> bytes:
    lines = [f"POST {API}/runs HTTP/1.1", "Host: localhost", f"Authorization: Bearer {secret}"]
    lines += ["Content-Type: application/json", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


LARGE = b'{"preset": "demo", "notes": "' + b"x" * (2 * LIMIT) + b'"}'
"""Would be accepted without the limit."""


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: 5", "Transfer-Encoding: chunked"], chunked(LARGE)),
        (["Transfer-Encoding: chunked", "Content-Length: 5"], chunked(LARGE)),
        (["Transfer-Encoding: chunked"], chunked(LARGE)),
        ([f"Content-Length: {len(LARGE)}"], LARGE),
        (["Content-Length: 5", f"Content-Length: {len(LARGE)}"], LARGE),
        ([f"Content-Length: {len(LARGE)}", "Content-Length: 5"], LARGE),
        ([f"Content-Length: {len(LARGE)}, 5"], LARGE),
        (["Content-Length: +5"], LARGE),
    ],
)
def test_no_pair_of_length_headers_brings_a_body_past_the_limit(
    address: tuple[str, int], token_for: Callable[[str], str], database: Database, headers: list[str], body: bytes
) -> None:
    status, answer = raw(address, head(token_for("submitter"), *headers, "Connection: close"), body)
    assert status in (400, 413), answer
    assert b"xxxx" not in answer
    assert runs.count(database) == 0


@pytest.mark.parametrize("max_body_s", [1.0])
def test_a_slow_body_is_ended_an_unauthenticated_not(address: tuple[str, int], token_for: Callable[[str], str]) -> None:
    status, answer = raw(address, head(token_for("submitter"), "Content-Length: 1000"), b'{"name": ')
    assert status == 408
    assert b"within 1 s" in answer
    status, answer = raw(address, head("gxpo_wrong", "Content-Length: 1000"), b'{"name": ')
    assert status == 401
    assert b"connection: close" in answer.lower(), "the rest of the body is not read"


@pytest.mark.parametrize("nesting", ["[" * 20_000, "[" * 900 + "]" * 900, '{"config":' * 400 + "1" + "}" * 400])
def test_deep_json_is_refused_everywhere(app: FastAPI, caller: TestClient, role: str, nesting: str) -> None:
    asked = 0
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            if method in ("post", "patch"):
                url = path.format(run_id=RUN, group_id="g" + RUN[1:], token_id="t1")
                for content in (nesting, f'{{"config": {nesting}}}', f'{{"base": {{"config": {nesting}}}}}'):
                    answer = caller.request(method, url, content=content, headers={"Content-Type": "application/json"})
                    assert answer.status_code < 500, (method, path, answer.text[:200])
                    assert answer.status_code >= 400 or not answer.json()["valid"]
                    assert (answer.status_code == 401) == (role == "nobody"), path
                    asked += 1
    assert asked > 30


@pytest.mark.parametrize(
    ("method", "path", "sent", "told"),
    [
        ("POST", "runs", {"data": {"x": "1"}}, 'body: is not JSON; send the header "Content-Type: application/json"'),
        ("POST", "runs", {"json": []}, "body: must be a JSON object"),
        ("POST", "runs", {"json": {"preset": "demo", "x": 1}}, "x: is unknown; remove it"),
        (
            "POST",
            "runs",
            {"json": {"preset": "demo", "notes": "n" * 20_001}},
            "notes: must be at most 20000 characters",
        ),
        ("POST", "runs", {"json": {"preset": "demo", "name": " \n"}}, "name: must not be empty"),
        ("POST", "runs", {"json": {"preset": "demo", "tags": [" "]}}, "tags.0: must not be empty"),
        (
            "POST",
            "runs",
            {"json": {"preset": "demo", "tags": ["t"] * 21}},
            "tags: has 21 entries and must have at most 20",
        ),
        (
            "POST",
            "sweeps",
            {"json": {"name": "s", "base": {"preset": "demo"}, "grid": {f"a.{n}": [1, 2] for n in range(9)}}},
            "grid: must have at most 8 entries",
        ),
        ("POST", "runs", {"json": {}}, "body: exactly one of config, toml and preset is required, not none"),
        ("POST", "runs", {"json": {"preset": "demo", "priority": "1"}}, "priority: must be a whole number"),
        ("GET", "runs", {"params": {"stat": "failed"}}, "stat: is not a parameter of this request; correct its name"),
        (
            "GET",
            "compare",
            {"params": {"runs": "r1", "base": "a"}},
            "base: is not a parameter of this request; correct its name",
        ),
    ],
)
def test_an_invalid_request_is_told_in_words(
    client: TestClient, method: str, path: str, sent: dict[str, Any], told: str
) -> None:
    answer = client.request(method, f"{API}/{path}", **sent)
    assert (answer.status_code, answer.json()["detail"]) == (422, told)


def test_no_endpoint_ignores_a_misspelt_parameter(client: TestClient) -> None:
    requests = [
        (method, path.replace("{run_id}", "r1"))
        for path, methods in client.get("/openapi.json").json()["paths"].items()
        for method, operation in methods.items()
        if operation.get("security") and path != "/metrics" and not path.endswith("/ingest")
    ]
    assert len(requests) > 40
    for method, path in requests:
        answer = client.request(method, path, params={"stat": "failed"}, **({"json": {}} if method != "get" else {}))
        assert (answer.status_code, answer.json()["detail"]) == (
            422,
            "stat: is not a parameter of this request; correct its name",
        ), (method, path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"config": {"budget": {"hours": 1e999}}}', "1e999 is not a JSON number"),
        ('{"preset": "demo", "priority": "0"}', "must be a whole number"),
        ('{"config": {"seed": true}}', "must be a whole number"),
    ],
)
def test_numbers_are_read_strictly(client: TestClient, content: str, told: str) -> None:
    for path in ("runs", "runs/validate"):
        answer = client.post(f"{API}/{path}", content=content, headers={"Content-Type": "application/json"})
        assert told in answer.text, path
        assert answer.status_code == 422 or not answer.json()["valid"], path


def test_a_token_of_a_launch_opens_its_own_report_only(app: FastAPI, anonymous: TestClient, database: Database) -> None:
    mine, others = launch(database), launch(database)
    run_id, secret = mine.split()
    other_id = others.split()[0]
    assert post(anonymous, mine, body(None)).status_code == 200
    before = runs.row(database, other_id)
    assert post(anonymous, f"{other_id} {secret}", body(1, metrics=[metric_row(1, a=1.0)])).status_code == 401
    assert runs.row(database, other_id) == before
    for path, operations in app.openapi()["paths"].items():
        if "get" in operations and not path.startswith("/health"):
            url = path.format(run_id=run_id, group_id="g" + RUN[1:], token_id="t1", step=1)
            assert anonymous.get(url, headers={"Authorization": f"Bearer {secret}"}).status_code == 401, path


RUN = "r" + "0" * 25


def num_series(client: TestClient) -> int:
    text = client.get("/metrics").text
    return sum(len(family.samples) for family in text_string_to_metric_families(text))


def test_invented_methods_and_paths_make_no_series(client: TestClient) -> None:
    def ask(numbers: range) -> set[int]:
        invented = [(f"M{n}", path) for n in numbers for path in (f"/nowhere/{n}", f"{API}/runs")]
        invented += [("GET", f"{API}/{n}/x") for n in numbers]
        return {client.request(method, path).status_code for method, path in invented}

    num_series(client)  # counts itself from the next time on
    ask(range(1))
    before = num_series(client)
    assert ask(range(1, 50)) == {404, 405}
    assert num_series(client) == before


def test_the_type_of_every_problem_leads_to_its_explanation_and_a_missing_method_names_those_that_are_there(
    client: TestClient,
) -> None:
    kinds = Problem.__subclasses__()
    assert len({kind.type for kind in kinds}) == len({kind.status for kind in kinds}) == len(kinds) > 10
    page = client.get(errors.PROBLEMS)
    assert page.headers["content-type"].startswith("text/html")
    for kind in kinds:
        where, _, anchor = kind.type.partition("#")
        assert where == errors.PROBLEMS
        assert f'<h2 id="{anchor}">{kind.status} ' in page.text
    assert client.get(f"{API}/runs/none").json()["type"] == f"{errors.PROBLEMS}#not-found"
    answer = client.delete(f"{API}/runs")
    assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")
    assert answer.headers["allow"] == "GET, POST", "of both routes"
    assert client.put(f"{API}/runs/{RUN}").headers["allow"] == "DELETE, GET, PATCH"


def test_a_probe_may_ask_for_the_head_alone(client: TestClient) -> None:
    assert [client.head(f"/health/{name}").status_code for name in ("live", "ready")] == [200, 200]


def test_an_internal_error_is_a_problem_with_the_request_id_and_its_traceback_is_in_the_log(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure(as_json=True)
    written = io.StringIO()
    monkeypatch.setattr(logging.getLogger("gxpo_services").handlers[0], "stream", written)

    def breaks(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("gxpo_services.health.generate_latest", breaks)
    answer = client.get("/metrics", headers={"X-Request-ID": "mine-1"})
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" in answer.json()["detail"]
    assert (answer.json()["request_id"], answer.json()["type"]) == ("mine-1", f"{errors.PROBLEMS}#internal-error")
    assert "secret detail" not in json.dumps(answer.json())
    (line,) = [line for line in map(json.loads, written.getvalue().splitlines()) if line["level"] == "error"]
    assert (line["event"], line["request_id"], line["path"]) == ("internal error", "mine-1", "/metrics")
    assert "ZeroDivisionError: secret detail" in line["exception"]
    assert "in breaks" in line["exception"]
