"""The client against a server that answers as the service does, and as a broken one does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gxpo_client.client import Client
from gxpo_client.connection import ResponseCache, connect
from gxpo_client.errors import NotSignedIn, Refused, ServiceUnavailable


class Server(ThreadingHTTPServer):
    """Serves configured responses and records requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, list[str]], dict[str, str], Any]] = []
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, parts.path, parse_qs(parts.query), dict(self.headers), body))
        status, content = self.server.answers.get(parts.path, (404, {"title": "Not found", "detail": "nothing here"}))
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(connect(server.url), "gxpo_secret")


def test_the_token_goes_with_each_call_and_none_without_one(server: Server, client: Client) -> None:
    server.answers["/api/v1/tokens/me"] = (200, {"role": "viewer"})
    client.me()
    Client(connect(server.url), None).me()
    assert server.asked[0][3]["Authorization"] == "Bearer gxpo_secret"
    assert "Authorization" not in server.asked[1][3]


def test_lists_are_repeated_and_what_is_empty_is_left_out(server: Server, client: Client) -> None:
    server.answers["/api/v1/runs"] = (200, {"items": []})
    client.get("/runs", state=["running", "failed"], text="", cursor=None, limit=50, tag=[], archived="any")
    assert server.asked[0][2] == {"state": ["running", "failed"], "limit": ["50"], "archived": ["any"]}


def test_names_of_metrics_travel_with_commas(server: Server, client: Client) -> None:
    server.answers["/api/v1/runs/r1/metrics"] = (200, {})
    client.metrics("r1", ["reward/mean", "gate/z"], "step", 0, 600)
    assert server.asked[0][2] == {
        "names": ["reward/mean,gate/z"], "x": ["step"], "after": ["0"], "max_points": ["600"]
    }  # fmt: skip


def test_series_are_joined_or_smoothed_only_on_demand(server: Server, client: Client) -> None:
    server.answers |= {"/api/v1/runs/r1/metrics": (200, {}), "/api/v1/metrics": (200, {"runs": {}})}
    client.metrics("r1", ["a"], "step", None, 600, joined=True)
    client.metrics_of(["r1"], ["a"], "step", None, 600, smoothing=0.9)
    client.metrics_of(["r1"], ["a"], "step", None, 600)
    queries = [asked[2] for asked in server.asked]
    assert [(query.get("joined"), query.get("smoothing")) for query in queries] == [
        (["true"], None), (None, ["0.9"]), (None, None)
    ]  # fmt: skip


@pytest.mark.parametrize("run", ["../tokens", "a/b", "..", "%2e%2e", "r?x=1", "r#f"])
def test_what_a_visitor_put_in_the_address_cannot_reach_another_path(server: Server, client: Client, run: str) -> None:
    with pytest.raises(Refused):
        client.run(run)
    path = server.asked[0][1]
    assert path.startswith("/api/v1/runs/")
    assert "/" not in path.removeprefix("/api/v1/runs/")


def test_a_refusal_names_every_bad_field(server: Server, client: Client) -> None:
    errors = [{"field": "config.learner.rule.k", "message": "must be at least 2"}]
    problem = {"title": "Invalid request", "detail": "1 bad setting", "errors": errors}
    server.answers["/api/v1/runs"] = (422, problem)
    with pytest.raises(Refused) as refused:
        client.submit({"config": {}}, "key")
    assert refused.value.status == 422
    assert refused.value.errors == [("config.learner.rule.k", "must be at least 2")]
    assert str(refused.value) == "1 bad setting"


def test_submitting_carries_its_key(server: Server, client: Client) -> None:
    server.answers["/api/v1/runs"] = (201, {"id": "r1"})
    assert client.submit({"config": {"seed": 1}}, "k1") == {"id": "r1"}
    assert server.asked[0][3]["Idempotency-Key"] == "k1"
    assert server.asked[0][4] == {"config": {"seed": 1}}


def test_an_unknown_token_is_distinguished_from_a_missing_role(server: Server, client: Client) -> None:
    server.answers["/api/v1/tokens/me"] = (401, {"title": "Sign in"})
    server.answers["/api/v1/runs/r1/cancel"] = (403, {"title": "Not allowed", "detail": "a viewer may not"})
    with pytest.raises(NotSignedIn):
        client.me()
    with pytest.raises(Refused, match="a viewer may not"):
        client.act("r1", "cancel")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_service_that_cannot_now_is_away(server: Server, client: Client, status: int) -> None:
    server.answers["/api/v1/runs/r1"] = (status, b"<html>proxy</html>")
    with pytest.raises(ServiceUnavailable):
        client.run("r1")


def test_nobody_at_the_address_is_away() -> None:
    gone = Server()
    client = Client(connect(gone.url), None)
    gone.close()
    with pytest.raises(ServiceUnavailable, match="does not respond"):
        client.me()


def test_while_the_service_is_away_a_page_reads_what_it_last_knew(server: Server) -> None:
    cache = ResponseCache()
    client = Client(connect(server.url), None, cache)
    server.answers["/api/v1/runs/r1"] = (200, {"state": "running"})
    client.run("r1")
    server.answers["/api/v1/runs/r1"] = (503, {})
    assert client.run("r1") == {"state": "running"}
    assert cache.offline
    server.answers["/api/v1/runs/r2"] = (503, {})
    with pytest.raises(ServiceUnavailable):
        client.run("r2")


def test_changes_and_who_asks_are_never_answered_from_memory(server: Server) -> None:
    client = Client(connect(server.url), None, ResponseCache())
    server.answers["/api/v1/tokens/me"] = (200, {"role": "admin"})
    server.answers["/api/v1/runs/r1/cancel"] = (200, {"state": "cancelling"})
    client.me()
    client.act("r1", "cancel")
    server.answers.update({"/api/v1/tokens/me": (503, {}), "/api/v1/runs/r1/cancel": (503, {})})
    with pytest.raises(ServiceUnavailable):
        client.me()
    with pytest.raises(ServiceUnavailable):
        client.act("r1", "cancel")


def test_the_memory_forgets_the_oldest() -> None:
    cache = ResponseCache(most=2)
    for key in ("a", "b", "a", "c"):
        cache.put(key, key)
    assert list(cache.answers) == ["a", "c"]


def test_a_sweep_over_one_setting_has_no_heat_map(server: Server, client: Client) -> None:
    server.answers["/api/v1/groups/g1/heatmap"] = (422, {"title": "Invalid request", "detail": "one setting"})
    assert client.heat_map("g1") is None
    with pytest.raises(Refused):
        client.heat_map("g2")
