"""Equal requests of several sessions are sent once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from gxpo_client.client import Client
from gxpo_client.connection import ResponseCache, connect
from gxpo_client.errors import Refused
from gxpo_client.shared_responses import SharedResponses


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_two_sessions_at_once_send_one_request() -> None:
    shared, sent = SharedResponses(), []
    started, released = threading.Event(), threading.Event()

    def send() -> str:
        sent.append(1)
        started.set()
        assert released.wait(30)
        return "answer"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.get, "key", send)
        assert started.wait(30)
        second = pool.submit(shared.get, "key", send)
        released.set()
        assert (first.result(30), second.result(30)) == ("answer", "answer")
    assert len(sent) == 1


def test_an_error_is_not_kept() -> None:
    shared = SharedResponses()

    def refuse() -> None:
        raise Refused("no")

    with pytest.raises(Refused):
        shared.get("key", refuse)
    assert shared.get("key", lambda: "answer") == "answer"


def test_two_clients_ask_once_and_again_after_a_change() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path} {request.headers['Authorization']}")
        return httpx.Response(200, json={"items": [], "id": "r1"})

    clock = Clock()
    shared = SharedResponses(1.0, clock)
    http = connect("http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    first, second = (Client(http, token, ResponseCache(), shared=shared) for token in ("a", "b"))
    first.get("/runs", limit=5)
    second.get("/runs", limit=5)
    assert len(asked) == 1
    second.get("/runs", limit=6)
    assert len(asked) == 2
    clock.now += 1.1
    second.get("/runs", limit=6)
    assert len(asked) == 3, "a second later it is sent again"
    first.change("r1", name="new")
    second.get("/runs", limit=5)
    assert asked[-1] == "GET /api/v1/runs Bearer b"
    # Who it is is asked for with each token.
    first.me()
    second.me()
    assert [line.split()[-1] for line in asked[-2:]] == ["a", "b"]
