"""The client: retries, error messages, and where a token is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gxpo_client import connection as module
from gxpo_client.client import Client
from gxpo_client.client import connect as connect_http
from gxpo_client.errors import InvalidRequest, NotFound, Refused, ServiceError, ServiceUnavailable
from gxpo_services.cli.common import CommandFailed, connect
from gxpo_trainer.errors import ConfigError

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses pass at once; a clock that only they move."""
    now = [0.0]
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])


def client_of(handler: Handler, **options: float) -> Client:
    http = connect_http("http://127.0.0.1:8000", transport=httpx.MockTransport(handler))
    return Client(http, "secret", **{"patience_s": 3.0} | options)


def failing(times: int, answer: httpx.Response, seen: list[httpx.Request]) -> Handler:
    """Loses the first so many connections."""

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) <= times:
            raise httpx.ConnectError("Connection refused", request=request)
        return answer

    return handle


def test_reads_are_retried_with_the_token() -> None:
    seen: list[httpx.Request] = []
    with client_of(failing(2, httpx.Response(200, json={"id": "r1"}), seen)) as client:
        assert client.run("r1")["id"] == "r1"
    assert len(seen) == 3
    assert seen[-1].headers["authorization"] == "Bearer secret"


def test_an_unreachable_service_is_an_error_with_a_fix() -> None:
    with client_of(failing(10**6, httpx.Response(200), [])) as client, pytest.raises(ServiceUnavailable) as caught:
        client.run("r1")
    failure = CommandFailed(caught.value)
    assert str(failure) == (
        "http://127.0.0.1:8000 does not respond (Connection refused); start one with `gxpo up`, "
        "or name another with --url"
    )
    assert failure.exit_code == 1


def test_a_submission_is_retried_with_the_same_key() -> None:
    seen: list[httpx.Request] = []
    with client_of(failing(1, httpx.Response(201, json={"id": "r1"}), seen)) as client:
        client.submit({"preset": "demo"})
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert len(seen) == 2


def test_a_change_without_a_key_is_not_retried() -> None:
    seen: list[httpx.Request] = []
    with client_of(failing(1, httpx.Response(200, json={}), seen)) as client, pytest.raises(ServiceUnavailable):
        client.change("r1", name="x")
    assert len(seen) == 1


def test_an_unavailable_service_is_retried() -> None:
    answers = [httpx.Response(503, json={"detail": "the database cannot be used now"}), httpx.Response(200, json=[])]
    with client_of(lambda _: answers.pop(0)) as client:
        assert client.get_list("/tokens") == []


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "message"),
    [
        (404, {"title": "Not found", "detail": "there is no run r1"}, NotFound, 1, "there is no run r1"),
        (409, {"title": "Conflict", "detail": "it has ended"}, Refused, 1, "it has ended"),
        (
            422,
            {
                "title": "Invalid request",
                "detail": "2 settings cannot be used",
                "errors": [
                    {"field": "config.seed", "message": "must be at least 0"},
                    {"field": "config.learner.rule.k", "message": "must be at least 2"},
                ],
            },
            InvalidRequest,
            2,
            "2 settings cannot be used\n  config.seed: must be at least 0\n  config.learner.rule.k: must be at least 2",
        ),
        (
            422,
            {"title": "Invalid request", "detail": "sort: bad", "errors": [{"field": "sort", "message": "bad"}]},
            InvalidRequest,
            2,
            "Invalid request\n  sort: bad",
        ),
        (500, None, Refused, 1, "the service responded with 500: Internal Server Error"),
    ],
)
def test_problem_details_become_one_message_and_an_exit_code(
    status: int, body: object, kind: type[ServiceError], code: int, message: str
) -> None:
    answer = httpx.Response(status, json=body) if body else httpx.Response(status, text="<html>")
    with client_of(lambda _: answer) as client, pytest.raises(ServiceError) as caught:
        client.get("/runs/r1")
    failure = CommandFailed(caught.value)
    assert (type(caught.value), failure.exit_code, str(failure)) == (kind, code, message)
    assert caught.value.status == status


def test_a_list_is_read_page_by_page_up_to_its_limit() -> None:
    asked: list[tuple[str | None, str]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        query = request.url.params
        asked.append((query.get("cursor"), query["limit"]))
        first = int(query.get("cursor") or 0)
        items = [{"id": f"r{number}"} for number in range(first, first + int(query["limit"]))]
        return httpx.Response(200, json={"items": items, "next_cursor": str(first + len(items))})

    with client_of(handle) as client:
        found = client.all_runs(limit=450, tag=["a", "b"], rule=None)
    assert [run["id"] for run in found] == [f"r{number}" for number in range(450)]
    assert asked == [(None, "200"), ("200", "200"), ("400", "50")]


def test_ids_cannot_lead_out_of_their_path() -> None:
    seen: list[httpx.Request] = []
    with client_of(failing(0, httpx.Response(200, json={}), seen)) as client:
        client.run("../tokens?x=1")
    assert seen[0].url.raw_path == b"/api/v1/runs/%2E%2E%2Ftokens%3Fx%3D1"


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_none_is_bad_usage(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like http"):
        connect(url)


def test_a_token_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_TOKEN", "other")
    with pytest.raises(ConfigError, match="check --token-file"):
        connect("http://127.0.0.1:8000", tmp_path / "nothing")
