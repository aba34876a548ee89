"""Calls of the REST API with retries and typed errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Self, cast
from urllib.parse import quote

import httpx

from gxpo_client.addresses import is_loopback
from gxpo_client.errors import InvalidRequest, NotSignedIn, ServiceUnavailable, error_of
from gxpo_client.shared_responses import SharedResponses

PREFIX = "/api/v1"
_MOST_ACTED_ON = 500
"""Runs that the service accepts in one request for an action on many."""
_PAGE = 200
_EVENTS = 1000
"""Largest page of events."""
_DOWNLOAD_S = 600.0
Json = dict[str, Any]
_Parameter = tuple[str, str | int | float | bool | None]


@dataclass
class ResponseCache:
    """The last `most` responses of a session. offline: whether the service has failed since."""

    answers: dict[Any, Any] = field(default_factory=dict)
    offline: bool = False
    most: int = 100

    def put(self, key: Any, answer: Any) -> None:
        self.answers.pop(key, None)
        self.answers[key] = answer
        while len(self.answers) > self.most:
            self.answers.pop(next(iter(self.answers)))


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

    patience_s: how long GET requests and requests with an idempotency key are retried while the service is
    unavailable. cache: serves GET requests while the service is unavailable; `me`, changes and downloads never.
    shared: responses of other clients with the same rights.
    """

    def __init__(
        self,
        http: httpx.Client,
        token: str | None,
        cache: ResponseCache | None = None,
        *,
        patience_s: float = 0.0,
        shared: SharedResponses | None = None,
    ) -> None:
        self._shared = shared
        self._http, self._token, self._cache, self._patience_s = http, token, cache, patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """Address of the service."""
        return str(self._http.base_url).rstrip("/").removesuffix(PREFIX)

    def me(self) -> Json:
        """{"id", "name", "role"} of the token; never cached."""
        return _object(self._request("GET", "/tokens/me"))

    # Runs

    def runs(self, **query: Any) -> Json:
        """A page: {"items", "next_cursor", "total"}. Lists become repeated parameters; None is omitted."""
        return self.get("/runs", **query)

    def all_runs(self, *, limit: int | None = None, **filters: Any) -> list[Json]:
        """All matching runs, page by page, at most `limit`."""
        return self._all("/runs", limit, **filters)

    def run(self, run: str) -> Json:
        return self.get(run_path(run))

    def act(self, run: str, action: str, body: Json | None = None) -> Json:
        """`cancel`, `pause`, `resume`, `retry`, or `clone` with {"overrides": …}; returns the run."""
        return self.post(f"{run_path(run)}/{_part(action)}", body, key=secrets.token_hex(16))

    def change(self, run: str, **changes: Any) -> Json:
        """Change name, tags, notes, priority or archived."""
        return _object(self._request("PATCH", run_path(run), json=changes))

    def act_on_all(self, runs: Sequence[str], action: str) -> list[Json]:
        """`cancel`, `pause`, `resume`, `archive`, `unarchive` or `delete`; per run {"run", "state", "problem"}."""
        parts = [list(runs[start : start + _MOST_ACTED_ON]) for start in range(0, len(runs), _MOST_ACTED_ON)]
        bodies = [{"action": action, "runs": part} for part in parts]
        return [item for body in bodies for item in self.post("/runs/actions", body)["items"]]

    def delete(self, run: str) -> None:
        self._request("DELETE", run_path(run))

    def submit(self, body: Json, key: str | None = None) -> Json:
        """Submit a run; the same `key` and body return the same run."""
        return self.post("/runs", body, key=key or secrets.token_hex(16))

    def validate(self, body: Json) -> Json:
        return self.post("/runs/validate", body)

    # Groups and sweeps

    def groups(self) -> list[Json]:
        """The newest groups."""
        return list(self.get("/groups", limit=_PAGE)["items"])

    def group(self, group: str) -> Json:
        return self.get(f"/groups/{_part(group)}")

    def cancel_group(self, group: str) -> Json:
        """Cancel every run of a group that has not ended."""
        return self.post(f"/groups/{_part(group)}/cancel")

    def sweep(self, body: Json, key: str | None = None) -> Json:
        return self.post("/sweeps", body, key=key or secrets.token_hex(16))

    def validate_sweep(self, body: Json) -> Json:
        return self.post("/sweeps/validate", body)

    def study(self, body: Json, key: str | None = None) -> Json:
        return self.post("/studies", body, key=key or secrets.token_hex(16))

    # Records of a run

    def metrics(
        self, run: str, names: Sequence[str], x: str, after: int | None, max_points: int, *, joined: bool = False
    ) -> Json:
        """Metrics of a run; `joined`: with the same steps for all names, and sums."""
        query = {"names": ",".join(names), "x": x, "after": after, "max_points": max_points, "joined": joined or None}
        return self.get(f"{run_path(run)}/metrics", **query)

    def metrics_of(
        self,
        runs: Sequence[str],
        names: Sequence[str],
        x: str,
        after: int | None,
        max_points: int,
        *,
        smoothing: float = 0.0,
    ) -> dict[str, Json]:
        """Metrics of several runs, by run; smoothing: weight of an exponential average, 0 for none."""
        query = {"runs": list(runs), "names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return dict(self.get("/metrics", **query, smoothing=smoothing or None)["runs"])

    def metric_names(self, run: str) -> list[str]:
        return self.get_list(f"{run_path(run)}/metrics/names")

    def events(self, run: str, after: int = 0, limit: int = _EVENTS) -> Json:
        return self.get(f"{run_path(run)}/events", after=after, limit=limit)

    def all_events(self, run: str) -> list[Json]:
        """All events in order, page by page."""
        return self._all(f"{run_path(run)}/events", page_size=_EVENTS)

    def newest_events(self, run: str, most: int) -> list[Json]:
        """At most `most` events, newest first, page by page."""
        return self._all(f"{run_path(run)}/events", most, page_size=_EVENTS, order="desc")

    def changes(
        self, runs: Sequence[str], after: int | None = 0, *, ids_only: bool = False
    ) -> Generator[tuple[str, Json] | None, None, None]:
        """Changes of runs as the service sends them: (`run`, its view), (`event`, with its `run`), (`deleted`, its id);
        None every two seconds without one. Ends when all runs have ended, or when the service closes the stream.

        runs: none for every run that has not ended. after: number of the last event received; None: only new ones.
        ids_only: views have nothing but their `id`.
        """
        query = {"runs": list(runs), "after": after, "ids_only": ids_only or None}
        with self.stream("/events/stream", **query) as (_, pieces):
            yield from _server_sent(pieces)

    def logs(self, run: str, offset: int, limit: int = 65_536) -> Json:
        """A section of the log; a negative offset counts from its end."""
        return self.get(f"{run_path(run)}/logs", offset=offset, limit=limit)

    def timeline(self, run: str, steps: int = 4) -> list[Json]:
        """What each process did in the last steps."""
        return list(self.get(f"{run_path(run)}/timeline", steps=steps)["items"])

    def samples(self, run: str, **query: Any) -> Json:
        return self.get(f"{run_path(run)}/samples", **query)

    def evaluations(self, run: str) -> list[Json]:
        """Records without the scores of each problem."""
        return list(self.get(f"{run_path(run)}/evaluations", per_problem=False)["items"])

    def checkpoints(self, run: str) -> list[Json]:
        return list(self.get(f"{run_path(run)}/checkpoints")["items"])

    def checkpoint_zip(self, run: str, step: int) -> bytes:
        return self._request("GET", f"{run_path(run)}/checkpoints/{step}/download", timeout=_DOWNLOAD_S).content

    # Comparison and catalogue

    def compare(self, **query: Any) -> Json:
        return self.get("/compare", **query)

    def heat_map(self, group: str, **query: Any) -> Json | None:
        """Heat map of a sweep; None when it does not vary two settings."""
        try:
            return self.get(f"/groups/{_part(group)}/heatmap", **query)
        except InvalidRequest:
            return None

    def export(self, runs: Sequence[str], form: str) -> bytes:
        """A zip archive of the runs' metrics and evaluations as csv, parquet or jsonl."""
        query = _parameters({"runs": list(runs), "format": form})
        return self._request("GET", "/export", params=query, timeout=_DOWNLOAD_S).content

    def schema(self) -> Json:
        return self.get("/schema")

    def presets(self) -> list[Json]:
        return self.get_list("/presets")

    def published(self) -> Json:
        return self.get("/published")

    # Requests

    def get(self, path: str, **query: Any) -> Json:
        """A JSON object, cached for outages if there is a cache."""
        return cast(Json, self._get(path, query))

    def get_list(self, path: str, **query: Any) -> list[Any]:
        """The same for an array."""
        return cast(list[Any], self._get(path, query))

    def _all(self, path: str, limit: int | None = None, *, page_size: int = _PAGE, **filters: Any) -> list[Json]:
        """The items of all pages of a list, at most `limit`."""
        found: list[Json] = []
        cursor: str | None = None
        while True:
            size = page_size if limit is None else min(page_size, limit - len(found))
            page = self.get(path, limit=size, cursor=cursor, **filters)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(found) >= limit):
                return found

    def _get(self, path: str, query: Mapping[str, Any]) -> Any:
        params = _parameters(query)
        key = (path, tuple(params))
        if self._cache is None:
            return self._request("GET", path, params=params, retry=True).json()
        if self._cache.offline and key in self._cache.answers:
            return self._cache.answers[key]
        try:
            answer = self._shared_json(path, params)
        except ServiceUnavailable:
            self._cache.offline = True
            if key in self._cache.answers:
                return self._cache.answers[key]
            raise
        self._cache.put(key, answer)
        return answer

    def _shared_json(self, path: str, params: list[_Parameter]) -> Any:
        def send() -> Any:
            return self._request("GET", path, params=params).json()

        if self._shared is None:
            return send()
        self._shared.follow(lambda: self.changes((), None, ids_only=True))
        return self._shared.get((path, tuple(params)), send, _runs_of(path, params))

    def post(self, path: str, body: Json | None = None, *, key: str | None = None) -> Json:
        headers = {"Idempotency-Key": key} if key else {}
        return _object(self._request("POST", path, json=body, headers=headers, retry=key is not None))

    def tokens(self) -> list[Json]:
        """All tokens, page by page."""
        return self._all("/tokens")

    def revoke_token(self, token: str) -> Json:
        return _object(self._request("DELETE", f"/tokens/{_part(token)}"))

    @contextmanager
    def stream(self, path: str, **query: Any) -> Iterator[tuple[str | None, Iterator[bytes]]]:
        """The offered file name, and the content as a stream."""
        try:
            with self._http.stream("GET", path, params=_parameters(query), headers=self._headers()) as response:
                if response.is_error:
                    response.read()
                    raise error_of(response)
                message = Message()
                message["Content-Disposition"] = response.headers.get("Content-Disposition", "")
                yield message.get_filename(), response.iter_bytes()
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, retry: bool = False, **request: Any
    ) -> httpx.Response:
        give_up = time.monotonic() + (self._patience_s if retry else 0.0)
        pause = 0.2
        while True:
            try:
                response = self._http.request(method, path, headers=self._headers() | dict(headers or {}), **request)
                if self._shared is not None and method != "GET":
                    self._shared.clear()
                if response.is_success:
                    return response
                problem = error_of(response)
            except httpx.TransportError as error:
                problem = self._unavailable(error)
            if not isinstance(problem, ServiceUnavailable) or time.monotonic() + pause > give_up:
                raise problem
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _unavailable(self, error: httpx.TransportError) -> ServiceUnavailable:
        return ServiceUnavailable(f"{self.url} does not respond ({str(error) or type(error).__name__})")


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


def _runs_of(path: str, params: Sequence[_Parameter]) -> list[str] | None:
    """Ids of the runs that a response is about, none for all; None for a log, which grows without a change of them."""
    kind, *names = path.strip("/").split("/")
    if names and names[-1] == "logs":
        return None
    return names[:1] if kind == "runs" and names else [str(value) for name, value in params if name == "runs"]


def run_path(run: str) -> str:
    return f"/runs/{_part(run)}"


def _part(text: str) -> str:
    """A path component; input such as `../tokens` cannot reach another path."""
    return quote(str(text), safe="").replace("..", "%2E%2E")


def _parameters(query: Mapping[str, Any]) -> list[_Parameter]:
    """Query parameters: None and empty text omitted, lists repeated, booleans in lower case."""
    return [
        (name, str(item).lower() if isinstance(item, bool) else str(item))
        for name, value in query.items()
        for item in (value if isinstance(value, list | tuple) else [value])
        if item is not None and item != ""
    ]


def _object(response: httpx.Response) -> Json:
    return cast(Json, response.json())
