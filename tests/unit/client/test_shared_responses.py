"""Equal requests of several sessions are sent once, and again when the stream of changes says so."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.service_processes import until

from gxpo_client.client import Client
from gxpo_client.connection import ResponseCache, connect
from gxpo_client.errors import Refused, ServiceUnavailable
from gxpo_client.shared_responses import IDLE_S, RETRY_S, RunChanges, SharedResponses, Stream

END = object()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Service:
    """A stream whose messages the test sends."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()
        self.connections = 0

    def connect(self) -> Stream:
        self.connections += 1
        while (message := self.messages.get(timeout=60)) is not END:
            if isinstance(message, Exception):
                raise message
            yield message


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.messages.put(END)


@pytest.fixture
def changes(service: Service, clock: Clock) -> RunChanges:
    """Connected, before any change."""
    changes = RunChanges(clock)
    changes.follow(service.connect)
    service.messages.put(None)
    until(lambda: changes.mark(()) is not None, "the connection")
    return changes


def send(service: Service, changes: RunChanges, kind: str, data: dict[str, Any]) -> None:
    before = changes.mark(())
    service.messages.put((kind, data))
    until(lambda: changes.mark(()) != before, "the change")


def test_a_mark_changes_with_its_runs_only(service: Service, changes: RunChanges) -> None:
    first, both, every = changes.mark(["a"]), changes.mark(["a", "b"]), changes.mark(())
    send(service, changes, "run", {"id": "b"})
    assert changes.mark(["a"]) == first
    assert changes.mark(["a", "b"]) != both
    assert changes.mark(()) != every
    send(service, changes, "event", {"run": "a", "number": 7, "id": "not a run"})
    assert changes.mark(["a"]) != first


def test_no_mark_while_the_stream_is_down_and_never_an_old_one_after_it(
    service: Service, changes: RunChanges, clock: Clock
) -> None:
    """A change in between was not seen."""
    before = changes.mark(["a"])
    service.messages.put(ServiceUnavailable("gone"))
    until(lambda: changes.mark(["a"]) is None, "the end of the stream")
    changes.follow(service.connect)
    assert service.connections == 1, "not at once"
    clock.now += RETRY_S

    def connected() -> bool:
        changes.follow(service.connect)
        return service.connections == 2

    until(connected, "the second connection")
    service.messages.put(None)
    until(lambda: changes.mark(["a"]) is not None, "the second connection's first message")
    assert changes.mark(["a"]) != before


def test_the_stream_is_left_when_nobody_asks(service: Service, changes: RunChanges, clock: Clock) -> None:
    clock.now += IDLE_S + 1
    service.messages.put(None)
    until(lambda: changes.mark(()) is None, "the end of the connection")


def test_a_shared_response_is_used_until_its_run_changes(service: Service, changes: RunChanges, clock: Clock) -> None:
    shared, counter = SharedResponses(1.0, clock, changes=changes), iter(range(100))

    def ask(key: str, runs: list[str] | None) -> int:
        response: int = shared.get(key, lambda: next(counter), runs)
        return response

    assert [ask("a", ["a"]), ask("list", []), ask("log", None)] == [0, 1, 2]
    clock.now = 5.0
    assert [ask("a", ["a"]), ask("list", []), ask("log", None)] == [0, 1, 3], "a log grows without a change"
    send(service, changes, "run", {"id": "b"})
    assert [ask("a", ["a"]), ask("list", [])] == [0, 4]
    clock.now = 10.5
    assert ask("a", ["a"]) == 5, "not indefinitely: some changes are not in the stream"


def test_clients_know_which_runs_a_response_is_about(service: Service, changes: RunChanges, clock: Clock) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.removeprefix("/api/v1"))
        return httpx.Response(200, json={"items": [], "runs": {}})

    http = connect("http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    client = Client(http, "token", ResponseCache(), shared=SharedResponses(1.0, clock, changes=changes))
    calls: list[Callable[[], Any]] = [
        lambda: client.run("a"),
        lambda: client.metrics_of(["a"], ["reward"], "step", None, 10),
        lambda: client.get("/runs", limit=5),
        lambda: client.get("/runs", "a", "logs", offset=0),
    ]
    for call in calls * 2:
        call()
        clock.now += 0.5
    assert asked == ["/runs/a", "/metrics", "/runs", "/runs/a/logs", "/runs/a/logs"]
    send(service, changes, "run", {"id": "b"})
    asked.clear()
    clock.now += 2.0
    for call in calls[:3]:
        call()
    assert asked == ["/runs"]


def test_a_client_follows_the_stream_of_all_runs() -> None:
    asked = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events/stream"):
            asked.query = str(request.url.query, "ascii")  # type: ignore[attr-defined]
            asked.set()
            return httpx.Response(404, json={"title": "Not found", "detail": "no stream here"})
        return httpx.Response(200, json={"items": []})

    http = connect("http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    shared = SharedResponses(changes=RunChanges())
    Client(http, "token", ResponseCache(), shared=shared).get("/runs", limit=5)
    assert asked.wait(30)
    assert asked.query == "ids_only=true"  # type: ignore[attr-defined]


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

    shared = SharedResponses(1.0, Clock())
    http = connect("http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    first, second = (Client(http, token, ResponseCache(), shared=shared) for token in ("a", "b"))
    first.get("/runs", limit=5)
    second.get("/runs", limit=5)
    assert len(asked) == 1
    second.get("/runs", limit=6)
    assert len(asked) == 2
    first.change("r1", name="new")
    second.get("/runs", limit=5)
    assert asked[-1] == "GET /api/v1/runs Bearer b"
    # Who it is is asked for with each token.
    first.me()
    second.me()
    assert [line.split()[-1] for line in asked[-2:]] == ["a", "b"]
