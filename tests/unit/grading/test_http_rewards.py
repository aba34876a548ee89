"""The component `http` against a real server on loopback that answers in every way that it should not."""

from __future__ import annotations

import asyncio
import socket
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from support.reward_server import PATIENCE_S, RewardServer, ask, reply, wait_for_close

from gxpo_trainer.types import HttpUsage

Behaviour = Callable[[int, Any, socket.socket], None]
SHORT_S = 0.5
"""A deadline that a test waits for; nothing is expected to be done by then."""


def fine(_: int, body: Any, connection: socket.socket) -> None:
    reply(connection, f'{{"reward": {body["worth"]}}}')


def says(body: bytes | str, status: str = "200 OK", *, length: int | None = None, more: str = "") -> Behaviour:
    return lambda number, received, connection: reply(connection, body, status, length=length, more=more)


def endless(_: int, body: Any, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:  # until the client closes
        connection.sendall(b" " * 65536)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Each of them for one request, the last one for the rest."""
    return lambda number, body, connection: behaviours[min(number, len(behaviours) - 1)](number, body, connection)


def test_the_servers_number_is_the_reward_and_no_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RewardServer(fine) as server, RewardServer(fine) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        answers = ask(server.url, {"worth": 0.5}, {"worth": -2}, {"worth": 1e300}, token="t0k3n")
    assert [answer.value for answer in answers] == [0.5, -2.0, 1e300]
    assert [(answer.usage.calls, answer.usage.cache_hits, answer.detail) for answer in answers] == [(1, 0, "")] * 3
    assert all(answer.usage.seconds > 0 for answer in answers)
    assert proxy.requests == []
    headers = server.headers.splitlines()
    assert headers[0] == "POST /score HTTP/1.1"
    assert {"Authorization: Bearer t0k3n", "Connection: close", "Accept-Encoding: identity"} <= {*headers}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (says("", "500 Internal Server Error"), "was answered with HTTP 500"),
        (says("yes"), "was answered with 'yes', which is not JSON"), (says("[" * 50_000), "which is not JSON"),
        (says('{"reward": NaN}'), "was answered with the reward nan, which is not a finite number"),
        (says('{"reward": "0.5"}'), "was answered with the reward '0.5', which is not a finite number"),
        (says("[1]"), 'which has no "reward"'),
        # A length that is too small ends the answer early.
        (says('{"reward": 0.75}', length=13), "was answered with '{\"reward\": 0.', which is not JSON"),
        # Compressed answers are not decoded, whatever was asked for.
        (says(zlib.compress(b'{"reward": 1}'), more="Content-Encoding: deflate\r\n"), "which is not JSON"),
        (endless, "was answered with more than 64 KiB"),
    ],
)  # fmt: skip
def test_an_unusable_answer_is_an_error_and_not_asked_for_again(behaviour: Behaviour, reason: str) -> None:
    with RewardServer(behaviour) as server:
        (answer,) = ask(server.url, {})
    assert (answer.value, answer.failure, answer.usage.calls) == (None, "error", 1)
    assert answer.detail.startswith("reward judge: ")
    assert reason in answer.detail


def test_a_redirect_is_an_error_that_names_its_target_and_is_not_followed() -> None:
    with RewardServer(fine) as other:
        with RewardServer(says("", "307 Temporary Redirect", more=f"Location: {other.url}\r\n")) as server:
            (answer,) = ask(server.url, {"worth": 1})
        assert other.requests == []
    assert answer.failure == "error"
    assert f"was redirected to {other.url} (HTTP 307); redirects are not followed" in answer.detail


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (lambda number, body, connection: None, "failed with RemoteProtocolError: Server disconnected"),
        (says("", more=f"X-Long: {'x' * 300_000}\r\n"), "failed with RemoteProtocolError"),
        # A length that is too large, and no more bytes.
        (says('{"reward": 1}', length=1000), "received 13 bytes, expected 1000"),
        (says("", "503 Service Unavailable"), "was answered with HTTP 503"),
        (says("", "429 Too Many Requests"), "was answered with HTTP 429"),
    ],
)  # fmt: skip
def test_a_failure_that_may_pass_is_retried_and_then_an_error_with_its_reason(
    behaviour: Behaviour, reason: str
) -> None:
    with RewardServer(behaviour) as server:
        (answer,) = ask(server.url, {}, retries=1)
    assert (answer.value, answer.failure, answer.usage.calls, len(server.requests)) == (None, "error", 2, 2)
    assert reason in answer.detail


def test_the_next_attempt_comes_no_earlier_than_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, sleep = [], asyncio.sleep

    async def at_once(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    with RewardServer(in_turn(says("", "429 Too Many Requests", more="Retry-After: 7\r\n"), fine)) as server:
        (answer,) = ask(server.url, {"worth": 3})
    assert answer.value == 3.0
    assert [seconds for seconds in waited if seconds] == [7.0]


def test_a_server_that_is_not_there_is_an_error_and_one_that_never_accepts_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        (answer,) = ask(url, {}, deadline_s=SHORT_S)
    assert (answer.failure, answer.usage.calls) == ("timeout", 1)
    (answer,) = ask(url, {}, retries=0)
    assert (answer.failure, answer.usage.calls) == ("error", 1)
    assert "failed with ConnectError" in answer.detail


def silent(_: int, body: Any, connection: socket.socket) -> None:
    wait_for_close(connection)


def trickle(_: int, body: Any, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
    pause = threading.Event()
    while True:  # until the client closes
        connection.sendall(b" ")
        pause.wait(0.02)


def declares_too_much_and_stays(_: int, body: Any, connection: socket.socket) -> None:
    reply(connection, '{"reward": 1}', length=1000)
    wait_for_close(connection)


@pytest.mark.parametrize("behaviour", [silent, trickle, declares_too_much_and_stays])
def test_what_takes_longer_than_the_deadline_is_a_timeout(behaviour: Behaviour) -> None:
    with RewardServer(behaviour) as server:
        (answer,) = ask(server.url, {}, deadline_s=SHORT_S)
    assert (answer.value, answer.failure) == (None, "timeout")
    assert "no answer within deadline_s = 0.5" in answer.detail


def test_no_more_requests_are_made_at_once_than_allowed() -> None:
    together = threading.Barrier(4)

    def waits_for_three_others(_: int, body: Any, connection: socket.socket) -> None:
        together.wait(PATIENCE_S)
        fine(0, body, connection)

    with RewardServer(waits_for_three_others) as server:
        answers = ask(server.url, *({"worth": n} for n in range(20)), concurrency=4)
    assert [answer.value for answer in answers] == [float(n) for n in range(20)]
    assert server.most_at_once == 4


def test_bytes_after_an_answer_are_never_taken_for_the_next_one() -> None:
    smuggled = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"reward": 99}'

    def answers_twice(number: int, body: Any, connection: socket.socket) -> None:
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"reward": 1}' + smuggled)
        wait_for_close(connection)

    with RewardServer(answers_twice) as server:
        answers = ask(server.url, {"n": 1}, {"n": 2}, together=False)
    assert [answer.value for answer in answers] == [1.0, 1.0]
    assert len(server.requests) == 2


def test_equal_bodies_share_one_call_while_it_is_under_way_and_later() -> None:
    with RewardServer(fine) as server:
        answers = ask(server.url, *[{"worth": 1, "text": "a"}, {"text": "a", "worth": 1}] * 5, {"worth": 2})
        assert len(server.requests) == 2
        later = ask(server.url, *[{"worth": 5}] * 3, together=False)
    assert [answer.value for answer in answers] == [1.0] * 10 + [2.0]
    assert sum((answer.usage for answer in answers), HttpUsage()).cache_hits == 9
    assert [answer.value for answer in later] == [5.0] * 3
    assert [(answer.usage.calls, answer.usage.cache_hits) for answer in later] == [(1, 0), (0, 1), (0, 1)]
    assert later[1].usage.seconds == 0.0
    # Failures are shared but not cached.
    with RewardServer(in_turn(says("", "500 Internal Server Error"), fine)) as server:
        answers = ask(server.url, {"worth": 1}, {"worth": 1}, {"worth": 1}, together=False)
    assert [(answer.value, answer.usage.calls) for answer in answers] == [(None, 1), (1.0, 1), (1.0, 0)]
    with RewardServer(says("", "500 Internal Server Error")) as server:
        assert [answer.failure for answer in ask(server.url, {}, {})] == ["error", "error"]
    assert len(server.requests) == 1


GROUP = [{"problem": "2 + 2?", "gold": "4", "extra": {}, "answer": a, "response": a, "turns": []} for a in "453"]


def test_a_group_is_one_request_and_each_response_has_its_number() -> None:
    with RewardServer(says('{"rewards": [1, -0.5, 0]}')) as server:
        answers = ask(server.url, *GROUP, per="group")
    shared = {"problem": "2 + 2?", "gold": "4", "extra": {}}
    responses = [{"answer": answer, "response": answer, "turns": []} for answer in "453"]
    assert server.requests == [{**shared, "responses": responses}]
    assert [answer.value for answer in answers] == [1.0, -0.5, 0.0]
    assert [answer.usage.calls for answer in answers] == [1, 0, 0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"rewards": [1, 2]}', "the rewards 2 numbers; must be a list of 3, one for each response"),
        ('{"rewards": {"0": 1}}', "the rewards {'0': 1}; must be a list of 3"),
        ('{"rewards": [1, "2", 0]}', "the reward '2', which is not a finite number"),
        ('{"reward": 1}', 'which has no "rewards"'),
    ],
)  # fmt: skip
def test_one_unusable_number_fails_the_whole_group(answer: str, reason: str) -> None:
    with RewardServer(says(answer)) as server:
        answers = ask(server.url, *GROUP, per="group")
    assert [(answer.value, answer.failure) for answer in answers] == [(None, "error")] * 3
    assert all(reason in answer.detail for answer in answers)
