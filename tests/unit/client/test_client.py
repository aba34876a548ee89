"""The client: requests, retries, errors, the cache for outages, and the messages of the command line."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import httpx
import pytest

import gxpo
from gxpo_client import client as module, formats
from gxpo_client.client import Client, ResponseCache, connect
from gxpo_client.errors import InvalidRequest, NotFound, NotSignedIn, Refused, ServiceError, ServiceUnavailable
from gxpo_services.cli.common import CommandFailed

API = "/api/v1"
URL = f"http://127.0.0.1:8000{API}"
Answer = tuple[int, Any]


class Service:
    """Answers each path with its status and content, or with several in turn; keeps the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | list[Answer]] = {}
        self.asked: list[httpx.Request] = []
        self.lost_connections = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if len(self.asked) <= self.lost_connections:
            raise httpx.ConnectError("Connection refused", request=request)
        answer = self.answers.get(request.url.path.removeprefix(API), (404, {"detail": "nothing here"}))
        status, content = answer.pop(0) if isinstance(answer, list) else answer
        body: Any = {"text": content} if isinstance(content, str) else {"json": content}
        return httpx.Response(status, **body)

    def query(self, number: int = 0) -> list[tuple[str, str]]:
        return self.asked[number].url.params.multi_items()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; pauses pass at once."""
    now = [100.0]
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def client(service: Service, now: list[float]) -> Client:
    return client_of(service, patience_s=3.0)


def client_of(service: Service, token: str | None = "secret", **options: Any) -> Client:
    return Client(connect("http://127.0.0.1:8000", transport=httpx.MockTransport(service)), token, **options)


def test_lists_are_repeated_and_empty_parameters_left_out(service: Service, client: Client) -> None:
    service.answers["/runs"] = (200, {"items": []})
    client.get("/runs", state=["running", "", None, "failed"], text="", cursor=None, limit=50, tag=[], archived="any")
    assert service.query() == [("state", "running"), ("state", "failed"), ("limit", "50"), ("archived", "any")]


@pytest.mark.parametrize(
    ("run", "path"),
    [("../tokens?x=1", b"%2E%2E%2Ftokens%3Fx%3D1"), (".", b"%2E"), ("%2e%2e", b"%252e%252e"), ("r#f", b"r%23f")],
)
def test_part_of_a_path_cannot_reach_another_path(service: Service, client: Client, run: str, path: bytes) -> None:
    for call in (client.run, lambda run: client.act(run, "cancel"), lambda run: client.request("DELETE", "/runs", run)):
        with pytest.raises(NotFound):
            call(run)
    paths = [request.url.raw_path for request in service.asked]
    assert paths == [b"/api/v1/runs/" + path, b"/api/v1/runs/" + path + b"/cancel", b"/api/v1/runs/" + path]


def test_a_part_of_a_path_may_have_dots(service: Service, client: Client) -> None:
    service.answers["/runs/v1.5..b"] = (200, {"id": "v1.5..b"})
    assert client.run("v1.5..b")["id"] == "v1.5..b"


def test_reads_are_retried_with_the_token(service: Service, client: Client) -> None:
    service.lost_connections = 2
    service.answers["/runs/r1"] = (200, {"id": "r1"})
    assert client.run("r1")["id"] == "r1"
    assert [request.headers["authorization"] for request in service.asked] == ["Bearer secret"] * 3
    client_of(service, None).run("r1")
    assert "authorization" not in service.asked[-1].headers


def test_an_unreachable_service_is_an_error_with_a_fix(service: Service, client: Client) -> None:
    service.lost_connections = 10**6
    with pytest.raises(ServiceUnavailable) as caught:
        client.run("r1")
    failure = CommandFailed(caught.value)
    assert str(failure) == (
        "http://127.0.0.1:8000 does not respond (Connection refused); start one with `gxpo up`, "
        "or name another with --url"
    )
    assert failure.exit_code == 1


def test_a_submission_is_retried_with_the_same_key_and_a_change_without_one_is_not(
    service: Service, client: Client
) -> None:
    service.lost_connections = 1
    service.answers["/runs"] = (201, {"id": "r1"})
    assert client.submit({"preset": "demo"}) == {"id": "r1"}
    first, second = service.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert json.loads(second.content) == {"preset": "demo"}
    client.submit({"preset": "demo"}, "mine")
    assert service.asked[-1].headers["idempotency-key"] == "mine"
    service.lost_connections = len(service.asked) + 1
    with pytest.raises(ServiceUnavailable):
        client.change("r1", name="x")
    assert len(service.asked) == service.lost_connections


def test_an_unavailable_service_is_retried(service: Service, client: Client) -> None:
    service.answers["/presets"] = [*((status, "<html>proxy</html>") for status in (502, 503, 504)), (200, [])]
    assert client.get("/presets") == []


def test_exports_and_downloads_are_retried_as_every_read(service: Service, now: list[float]) -> None:
    client = gxpo.Client("http://127.0.0.1:8000")
    client.api = client_of(service, patience_s=60.0)
    table = "run,step,benchmark,metric,value\nr1,1,math,pass@1,0.25\n"
    answers = {"/export": table, "/runs/r1/checkpoints/10/download": "zip"}
    service.answers = {path: [(503, "<html>proxy</html>"), (200, text), (200, text)] for path, text in answers.items()}
    assert client.api.export(["r1"], "csv").decode() == table
    assert client.api.checkpoint_zip("r1", 10) == b"zip"
    assert client.api.export(["r1"], "csv", ["g1"]).decode() == table
    assert service.query(-1) == [("runs", "r1"), ("groups", "g1"), ("format", "csv")]
    for call in (client.metrics, client.evaluations):
        service.answers["/export"] = [(503, "<html>proxy</html>"), (200, table)]
        assert list(call("r1").iloc[0]) == [0.25]


def invalid(detail: str, **errors: str) -> Answer:
    named = [{"field": field.replace("__", "."), "message": message} for field, message in errors.items()]
    return 422, {"title": "Invalid request", "detail": detail, "errors": named}


@pytest.mark.parametrize(
    ("answer", "kind", "code", "message"),
    [
        ((401, {"title": "Sign in"}), NotSignedIn, 1, "Sign in (--token-file FILE or GXPO_TOKEN)"),
        ((404, {"title": "Not found", "detail": "there is no run r1"}), NotFound, 1, "there is no run r1"),
        (invalid("two", seed="is bad", rule__k="is 0"), InvalidRequest, 2, "two\n  seed: is bad\n  rule.k: is 0"),
        (invalid("sort: bad", sort="bad"), InvalidRequest, 2, "Invalid request\n  sort: bad"),
        *(
            ((403, {"title": "Forbidden", "errors": errors, "left_out": 3}), Refused, 1, "Forbidden")
            for errors in (["permission denied"], {"url": ["bad"]}, 3)
        ),
        ((500, "<html>"), Refused, 1, "the service responded with 500: Internal Server Error"),
        ((200, "html"), Refused, 1, f"the answer of {URL}/runs/r1 is not from a gxpo service; check --url or GXPO_URL"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_an_error_becomes_one_message_and_an_exit_code(
    service: Service, cached: bool, answer: Answer, kind: type[ServiceError], code: int, message: str
) -> None:
    service.answers["/runs/r1"] = answer
    with pytest.raises(ServiceError) as caught:
        client_of(service, cache=ResponseCache() if cached else None).run("r1")
    failure = CommandFailed(caught.value)
    assert (type(caught.value), failure.exit_code, str(failure)) == (kind, code, message)
    assert caught.value.status == answer[0]


def test_a_web_page_is_neither_an_export_nor_a_stream_of_changes() -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, html="<html>\n\nsign in</html>"))
    client = Client(connect("http://127.0.0.1:8000", transport=page), None)
    for call in (lambda: client.export(["r1"], "csv"), lambda: next(client.changes(["r1"]))):
        with pytest.raises(Refused, match="is not from a gxpo service"):
            call()


@pytest.mark.parametrize("token", ["gxpo_é", "“gxpo_abc”", "gxpo_a\nb"])
def test_a_token_that_no_request_can_carry_is_not_sent(service: Service, client: Client, token: str) -> None:
    client = client_of(service, token, patience_s=3.0)
    for call in (lambda: client.run("r1"), lambda: client.stream("/export").__enter__()):
        with pytest.raises(NotSignedIn) as caught:
            call()
        words = "the token has a character that no token has; copy it again (--token-file FILE or GXPO_TOKEN)"
        assert str(CommandFailed(caught.value)) == words
    assert service.asked == []


@pytest.mark.parametrize("key", ["größe", "a\nb", "a b", "a" * 201, "a\n"])
def test_an_idempotency_key_that_no_request_can_carry_is_not_sent(service: Service, client: Client, key: str) -> None:
    service.answers["/runs"] = (201, {"id": "r1"})
    with pytest.raises(InvalidRequest) as caught:
        client.submit({"preset": "demo"}, key)
    words = f"the idempotency key {key!r} must be 1 to 200 printable ASCII characters without blanks"
    assert (str(caught.value), CommandFailed(caught.value).exit_code, service.asked) == (words, 2, [])
    assert client.submit({"preset": "demo"}, "!~" * 100) == {"id": "r1"}


def test_a_list_is_read_page_by_page_up_to_its_limit(service: Service, client: Client) -> None:
    pages = [list(range(0, 200)), list(range(200, 400)), list(range(400, 450))]
    service.answers["/runs"] = [(200, {"items": page, "next_cursor": str(page[-1] + 1)}) for page in pages]
    assert client.all_of("/runs", limit=450, tag=["a", "b"], rule=None) == list(range(450))
    tags = [("tag", "a"), ("tag", "b")]
    assert [service.query(number) for number in range(3)] == [
        [("limit", "200"), *tags],
        [("limit", "200"), ("cursor", "200"), *tags],
        [("limit", "50"), ("cursor", "400"), *tags],
    ]


def test_while_the_service_is_away_a_page_reads_what_it_last_knew(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    cache = ResponseCache()
    client = client_of(service, cache=cache)
    service.answers["/runs/r1"] = (200, {"state": "running"})
    client.run("r1")
    service.answers |= {"/runs/r1": (504, {}), "/runs/r2": (504, {})}
    assert client.run("r1") == {"state": "running"}
    assert cache.offline
    with pytest.raises(ServiceUnavailable):
        client.run("r2")


def test_a_request_that_the_service_cannot_serve_leaves_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process that compares runs was killed: a page would load again and again, and never be drawn."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    cache = ResponseCache()
    client = client_of(service, cache=cache)
    service.answers |= {"/runs/r1": (200, {"state": "running"}), "/tokens/me": (200, {})}
    service.answers["/compare"] = (503, {"detail": "killed; retry"})
    client.run("r1")
    with pytest.raises(ServiceUnavailable, match="killed; retry"):
        client.get("/compare")
    assert not cache.offline
    service.answers["/runs/r1"] = (200, {"state": "succeeded"})
    assert client.run("r1") == {"state": "succeeded"}


def test_a_service_that_hangs_does_not_keep_a_page_for_a_minute(service: Service) -> None:
    cache = ResponseCache()
    client = client_of(service, cache=cache)
    paths = ("/runs/r1", "/runs/r2", "/compare", "/groups/g1/heatmap", "/tokens/me")
    service.answers = dict.fromkeys(paths, (200, {}))
    client.run("r1")
    client.get("/compare", runs=["r1"])
    client.heat_map("g1")
    cache.offline = True
    client.run("r2")
    assert [request.extensions["timeout"]["read"] for request in service.asked] == [16, 5, 60, 5, 60, 1]
    assert [request.url.path for request in service.asked][1::2] == ["/api/v1/tokens/me"] * 2 + ["/api/v1/runs/r2"]
    service.asked.clear()
    service.lost_connections, cache.offline = 10**6, False
    for ask in (
        partial(client.post, "/runs/validate", body={}),
        partial(client.change, "r1", name="new"),
        partial(client.get, "/compare", runs=["r2"]),
    ):
        with pytest.raises(ServiceUnavailable):
            ask()
    assert [request.extensions["timeout"]["read"] for request in service.asked] == [5, 1, 1], "none that may take long"


def test_a_session_reads_what_it_has_just_read_once_until_it_changes_something(
    service: Service, now: list[float]
) -> None:
    client = client_of(service, cache=ResponseCache())
    service.answers |= dict.fromkeys(("/runs/r1", "/tokens/me"), (200, {}))
    counts = []
    for passed, change in ((0.0, False), (0.5, False), (1.1, False), (0.1, True)):
        now[0] += passed
        if change:
            client.change("r1", name="new")
        client.run("r1")
        reads = [request for request in service.asked if request.method == "GET" and "/runs/" in request.url.path]
        counts.append(len(reads))
    assert counts == [1, 1, 2, 3]


def test_a_response_that_has_not_changed_is_not_sent_again(now: list[float]) -> None:
    tags: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == f"{API}/tokens/me":
            return httpx.Response(200, json={})
        tags.append(request.headers.get("If-None-Match"))
        return httpx.Response(304) if tags[-1] else httpx.Response(200, json={"runs": 2}, headers={"ETag": '"1"'})

    def later() -> dict[str, Any]:
        now[0] += 2 * module.FRESH_S
        return client.get("/compare", runs=["a", "b"])

    client = Client(connect("http://127.0.0.1:8000", transport=httpx.MockTransport(answer)), None, ResponseCache())
    assert [later() for _ in range(3)] == [{"runs": 2}] * 3
    assert tags == [None, '"1"', '"1"']


def test_changes_and_the_token_s_name_never_come_from_the_cache(service: Service) -> None:
    client = client_of(service, cache=ResponseCache())
    calls = {
        "/tokens/me": lambda: client.send("GET", "/tokens/me"),
        "/runs/r1/cancel": lambda: client.act("r1", "cancel"),
    }
    for path, call in calls.items():
        service.answers[path] = (200, {})
        call()
        service.answers[path] = (503, {})
        with pytest.raises(ServiceUnavailable):
            call()
        service.answers[path] = (200, {})


# Numbers and durations are readable.


def test_ages_and_plurals() -> None:
    ages = [formats.age(seconds) for seconds in (-3, 59, 75, 11520, 200000)]
    assert ages == ["just now", "just now", "1 min ago", "3 h ago", "2 d ago"]
    words = [formats.number_of(n, what) for n, what in ((1, "run"), (1, "pass"), (2000, "run"), (2, "backward pass"))]
    assert words == ["1 run", "1 pass", "2,000 runs", "2 backward passes"]


def test_many_names_with_the_same_reason_are_one_line() -> None:
    excluded = [("a", "late"), *((name, "tuned") for name in "bcd")]
    assert formats.by_reason(excluded) == excluded
    assert formats.by_reason([*excluded, ("e", "tuned")]) == [("a", "late"), ("b, c, d and 1 more", "tuned")]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"), (0.0042, "4.2 ms"), (4.24, "4.2 s"), (59, "59 s"), (75, "1 min 15 s"), (11520, "3 h 12 min"),
        (200_000, "2 d 7 h"), (None, "–"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert formats.duration(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (512, "512 B"), (1023.9, "1.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (2**30 - 2**19, "1023.5 MiB"),
        (2**60, "1048576.0 TiB"),
    ],
)  # fmt: skip
def test_sizes(num_bytes: float, words: str) -> None:
    assert formats.size(num_bytes) == words


def test_figures() -> None:
    assert formats.percent(0.4132) == "41.3%"
    assert [formats.share_done(share) for share in (0.0, 0.29, 0.995, 1.0)] == ["0%", "29%", "99%", "100%"]
    assert formats.count(12345.0) == "12,345"
    assert formats.count(1.5) == "1.50"
    assert formats.figure(0.00012346) == "0.0001235"
    assert [formats.figure(value) for value in (999.96, 9999.4, 9999.6, -123_456.7)] == [
        "1,000", "9,999", "10,000", "−123,457"
    ]  # fmt: skip
    assert [formats.figure(value, 3) for value in (99.94, 999.6, 1234)] == ["99.9", "1,000", "1,234"]
    assert [formats.significant(value) for value in (9.994, 9.996, 0.9996, 999.6, 1234.5)] == [
        "9.99", "10.0", "1.00", "1,000", "1,234"
    ]  # fmt: skip
    assert [formats.signed(value, 1) for value in (-0.06, -0.04, 0.04)] == ["−0.1", "+0.0", "+0.0"]
    assert (formats.percent(-1e-9), formats.count(-1e-9), formats.figure(-0.0)) == ("0.0%", "0.00", "0")
    assert formats.moment(0) == "1970-01-01 00:00:00 UTC"
    assert formats.percent(math.nan) == formats.NONE
    assert (formats.figure(-1.5), formats.count(-2), formats.percent(-0.5)) == ("−1.5", "−2", "−50.0%")
    assert formats.figure(1e-7) == "1e−07"
