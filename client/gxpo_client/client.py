"""The client of the REST API: URL checks, retries, typed errors, a cache for outages, and calls with a name."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from ipaddress import ip_address
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote

import httpx

from gxpo_client.errors import InvalidRequest, NotSignedIn, ServiceError, ServiceUnavailable, error_of


def is_http(url: str) -> bool:
    """Whether this is an HTTP URL with a valid host and port."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 80) < 65536


def is_loopback(url: str) -> bool:
    """Whether the URL points to this machine, which no proxy can reach."""
    try:
        return is_loopback_host(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False


def is_loopback_host(host: str | None) -> bool:
    """Whether a host name or address is this machine's own; None and empty are not."""
    name = (host or "").strip().strip("[]").lower()
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def is_up(url: str, timeout_s: float) -> bool:
    """Whether a GET of this URL succeeds."""
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=not is_loopback(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


PREFIX = "/api/v1"
PAGE = 200
FRESH_S = 1.0
_DOWNLOAD_S = 600.0
_PAGE_S, _OFFLINE_S, _PROBE_S = httpx.Timeout(16.0, connect=5.0), httpx.Timeout(1.0), httpx.Timeout(5.0)
"""Time-outs of a client with a cache. A read: longer than a statement of the database may take; while the service does
not respond; and the question whether it does."""
_COMPUTED = ("compare", "heatmap")
"""Last parts of paths whose answers may take the client's own time-out, once the service is known to respond."""
_KEY = re.compile(r"[\x21-\x7e]{1,200}")  # as the service's (api/idempotency.py)
Json = dict[str, Any]
K = TypeVar("K")
V = TypeVar("V")


def keep(store: dict[K, V], key: K, value: V, most: int) -> V:
    """Store a value as the newest; the oldest ones beyond `most` are dropped."""
    store.pop(key, None)
    store[key] = value
    while len(store) > most:
        store.pop(next(iter(store)), None)
    return value


@dataclass
class ResponseCache:
    """The last `most` responses of a session, each with its time and entity tag.

    offline: whether the service has not responded since.

    A response is used again within FRESH_S seconds, unless the session has changed something since.
    """

    answers: dict[Any, tuple[float, Json, str | None]] = field(default_factory=dict)
    offline: bool = False
    most: int = 100
    changed_at: float = -math.inf


def connect(url: str, *, transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """A connection pool, which several clients may share; it holds no token. transport: for tests."""
    return httpx.Client(
        base_url=url.rstrip("/") + PREFIX,
        timeout=httpx.Timeout(60.0, connect=5.0),
        transport=transport,
        # A proxy of the environment cannot reach this machine's own service.
        trust_env=not is_loopback(url),
    )


class Client:
    """The API with one token.

    What has no method here is reached by its path: `get("/runs", run, "timeline", steps=4)`. The first part is the path
    of a collection, the others are quoted: a part such as `../tokens` cannot reach another path.

    patience_s: how long GET requests and requests with an idempotency key are retried while the service is
    unavailable. cache: serves GET requests while the service is unavailable; `me`, changes and downloads never.
    """

    def __init__(
        self,
        http: httpx.Client,
        token: str | None,
        cache: ResponseCache | None = None,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._http, self._token, self._cache, self._patience_s = http, token, cache, patience_s
        self.url = str(http.base_url).rstrip("/").removesuffix(PREFIX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, *parts: str, **query: Any) -> Json:
        """A JSON object, cached for outages if there is a cache."""
        params = parameters(query)
        cache = self._cache
        if cache is None:
            return self.send("GET", path, *parts, params=params, retry=True)
        key, now = (path, parts, params), time.monotonic()
        at, known, tag = cache.answers.get(key, (-math.inf, {}, None))
        if key in cache.answers and (cache.offline or at > max(cache.changed_at, now - FRESH_S)):
            return known
        try:
            headers = {"If-None-Match": tag} if tag else {}
            timeout: Any = _OFFLINE_S if cache.offline else _PAGE_S
            if [path, *parts][-1].endswith(_COMPUTED) and not cache.offline:
                self._probe()
                timeout = httpx.USE_CLIENT_DEFAULT
            response = self.request("GET", path, *parts, params=params, headers=headers, timeout=timeout)
        except ServiceUnavailable as error:
            cache.offline |= error.status != httpx.codes.SERVICE_UNAVAILABLE  # of this request alone, perhaps
            if key in cache.answers:
                return known
            raise
        if response.status_code != httpx.codes.NOT_MODIFIED:
            known, tag = _content(response), response.headers.get("ETag")
        return keep(cache.answers, key, (now, known, tag), cache.most)[1]

    def all_of(
        self, path: str, *parts: str, limit: int | None = None, page_size: int = PAGE, **filters: Any
    ) -> list[Json]:
        """The items of all pages of a list, at most `limit`."""
        items: list[Json] = []
        cursor: str | None = None
        while True:
            size = page_size if limit is None else min(page_size, limit - len(items))
            page = self.get(path, *parts, limit=size, cursor=cursor, **filters)
            items += page["items"]
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(items) >= limit):
                return items

    def post(self, path: str, *parts: str, body: Json | None = None, key: str | None = None) -> Json:
        """key: an idempotency key, with which the request may be repeated."""
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest(
                f"the idempotency key {key!r} must be 1 to 200 printable ASCII characters without blanks"
            )
        headers = {"Idempotency-Key": key} if key else {}
        return self.send("POST", path, *parts, json=body, headers=headers, retry=key is not None)

    def _probe(self) -> None:
        """Raise ServiceUnavailable within seconds where a page would wait a minute for a service that hangs."""
        if (cache := self._cache) is not None:
            try:
                self.request("GET", "/tokens/me", timeout=_OFFLINE_S if cache.offline else _PROBE_S)
            except ServiceUnavailable as error:
                cache.offline |= error.status != httpx.codes.SERVICE_UNAVAILABLE
                raise

    def send(self, method: str, path: str, *parts: str, **request: Any) -> Json:
        """The JSON object that answers `request`."""
        return _content(self.request(method, path, *parts, **request))

    def request(
        self,
        method: str,
        path: str,
        *parts: str,
        headers: Mapping[str, str] | None = None,
        retry: bool = False,
        **request: Any,
    ) -> httpx.Response:
        """A successful response, never cached. retry: for `patience_s`, while the service is unavailable.

        Raises the errors of `errors`.
        """
        if method != "GET":
            self._probe()
        # Quoted: input such as `../tokens` or `.` cannot reach another path.
        path = "/".join([path, *(quote(part, safe="").replace(".", "%2E") for part in parts)])
        give_up = time.monotonic() + (self._patience_s if retry else 0.0)
        pause = 0.2
        while True:
            try:
                response = self._http.request(method, path, headers=self._headers() | dict(headers or {}), **request)
                if self._cache is not None and method != "GET":
                    self._cache.changed_at = time.monotonic()
                problem = _problem(response)
                if problem is None:
                    return response
            except httpx.TransportError as error:
                problem = self._unavailable(error)
            if not isinstance(problem, ServiceUnavailable) or time.monotonic() + pause > give_up:
                raise problem
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    @contextmanager
    def stream(self, path: str, **query: Any) -> Iterator[tuple[str | None, Iterator[bytes]]]:
        """The offered file name, and the content as a stream."""
        try:
            with self._http.stream("GET", path, params=parameters(query), headers=self._headers()) as response:
                if (problem := _problem(response)) is not None:
                    raise problem
                message = Message()
                message["Content-Disposition"] = response.headers.get("Content-Disposition", "")
                yield message.get_filename(), response.iter_bytes()
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    def changes(self, runs: Sequence[str], after: int | None = 0) -> Generator[tuple[str, Json] | None, None, None]:
        """Changes of runs as the service sends them: (`run`, its view), (`event`, with its `run`), (`deleted`, its id);
        None every two seconds without one. Ends when all runs have ended, or when the service closes the stream.

        runs: none for every run that has not ended. after: number of the last event received; None: only new ones.
        """
        with self.stream("/events/stream", runs=list(runs), after=after) as (_, pieces):
            yield from _server_sent(pieces)

    def run(self, run: str) -> Json:
        return self.get("/runs", run)

    def act(self, run: str, action: str, body: Json | None = None) -> Json:
        """`cancel`, `pause`, `resume`, `retry`, or `clone` with {"overrides": …}; returns the run."""
        return self.post("/runs", run, action, body=body, key=secrets.token_hex(16))

    def change(self, run: str, **changes: Any) -> Json:
        """Change name, tags, notes, priority or archived."""
        return self.send("PATCH", "/runs", run, json=changes)

    def act_on_all(self, runs: Sequence[str], action: str) -> list[Json]:
        """`cancel`, `pause`, `resume`, `archive`, `unarchive` or `delete` of at most 500 runs; per run {"run", "state",
        "problem"}."""
        return list(self.post("/runs/actions", body={"action": action, "runs": list(runs)})["items"])

    def submit(self, body: Json, key: str | None = None, *, to: str = "/runs") -> Json:
        """Submit a run, a sweep (to="/sweeps") or a study ("/studies"); the same `key` and body submit it once."""
        return self.post(to, body=body, key=key or secrets.token_hex(16))

    def metrics_of(
        self, runs: Sequence[str], names: Sequence[str], x: str, after: int | None, max_points: int, **more: Any
    ) -> dict[str, Json]:
        """Metrics by run. more: `from` and `to`, the ends of a part of the axis; `smoothing`, the weight of an
        exponential average; `joined`, with the same steps for all names, and sums."""
        query = {"runs": list(runs), "names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return dict(self.get("/metrics", **query, **more)["runs"])

    def metric_names(self, run: str) -> list[str]:
        return cast(list[str], self.get("/runs", run, "metrics", "names"))

    def evaluations(self, run: str) -> list[Json]:
        """Records without the scores of each problem."""
        return list(self.get("/runs", run, "evaluations", per_problem=False)["items"])

    def checkpoint_zip(self, run: str, step: int) -> bytes:
        parts = ("/runs", run, "checkpoints", str(step), "download")
        return self.request("GET", *parts, retry=True, timeout=_DOWNLOAD_S).content

    def heat_map(self, group: str, **query: Any) -> Json | None:
        """Heat map of a sweep; None when it does not vary two settings."""
        try:
            return self.get("/groups", group, "heatmap", **query)
        except InvalidRequest:
            return None

    def export(self, runs: Sequence[str], form: str, groups: Sequence[str] = ()) -> bytes:
        """A zip archive of the metrics and evaluations of runs, and of the runs of groups, as csv or jsonl."""
        query = parameters({"runs": list(runs), "groups": list(groups), "format": form})
        return self.request("GET", "/export", params=query, retry=True, timeout=_DOWNLOAD_S).content

    def _headers(self) -> dict[str, str]:
        token = self._token or ""
        if not (token.isascii() and token.isprintable()):
            raise NotSignedIn("the token has a character that no token has; copy it again")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _unavailable(self, error: httpx.TransportError) -> ServiceUnavailable:
        return ServiceUnavailable(f"{self.url} does not respond ({str(error) or type(error).__name__})")


def _content(response: httpx.Response) -> Json:
    try:
        return cast(Json, response.json())
    except ValueError:
        raise error_of(response) from None


def _problem(response: httpx.Response) -> ServiceError | None:
    """The error that a response is, if any. A web page is one of another server or of a proxy."""
    page = response.headers.get("Content-Type", "").startswith("text/html")
    if (response.is_success and not page) or response.status_code == httpx.codes.NOT_MODIFIED:
        return None
    response.read()
    return error_of(response)


def _server_sent(pieces: Iterator[bytes]) -> Iterator[tuple[str, Json] | None]:
    """(kind, data) of each Server-Sent Event; None for a comment. Raises NotSignedIn for a revoked token."""
    rest = b""
    for piece in pieces:
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if not line.startswith(":"))
            kind = fields.get("event")
            if kind == "revoked":
                raise NotSignedIn("the token was revoked", status=401)
            if kind == "end":
                return
            yield None if kind is None else (kind, cast(Json, json.loads(fields["data"])))


def parameters(query: Mapping[str, Any]) -> httpx.QueryParams:
    """Query parameters without None and empty text; lists are repeated."""
    lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in query.items()}
    return httpx.QueryParams({name: [v for v in values if v is not None and v != ""] for name, values in lists.items()})
