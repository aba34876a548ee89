"""The REST service as the dashboard sees it: typed calls, three kinds of failure.

ServiceError
├── ServiceUnavailable     it does not answer, or answers that it cannot now; asking again may help
├── NotSignedIn     no token, or one that the service does not (any more) accept
└── Refused         it answered no: `status`, `title`, `detail`, and `errors` with every bad field
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

PREFIX = "/api/v1"
Json = dict[str, Any]


class ServiceError(Exception):
    """Base of what can go wrong between page and service."""


class ServiceUnavailable(ServiceError):
    """The service does not answer now."""


class NotSignedIn(ServiceError):
    """The token is missing, unknown, revoked or expired."""


@dataclass
class Refused(ServiceError):
    """The service said no. `errors`: dotted path and message of every bad field."""

    status: int
    title: str
    detail: str
    errors: list[tuple[str, str]]

    def __str__(self) -> str:
        return self.detail or self.title


@dataclass
class Memory:
    """What one session read last, by question, the newest `most` of them. away: whether the service failed since."""

    answers: dict[Any, Any] = field(default_factory=dict)
    away: bool = False
    most: int = 100

    def keep(self, key: Any, answer: Any) -> None:
        self.answers.pop(key, None)
        self.answers[key] = answer
        while len(self.answers) > self.most:
            self.answers.pop(next(iter(self.answers)))


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address means this machine only; None and empty do not."""
    if not host:
        return False
    name = host.strip().strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def connect(url: str) -> httpx.Client:
    """A pool of connections to the service at `url`, to be shared by all visitors; it carries no token."""
    return httpx.Client(
        base_url=url.rstrip("/") + PREFIX,
        timeout=httpx.Timeout(30.0, connect=2.0),
        # A proxy of the environment is for the outside world, never for this machine's own service.
        trust_env=not is_loopback(urlsplit(url).hostname),
    )


class Client:
    """One visitor's view of the service; cheap to make.

    With a memory, what was read before is read from there while the service is away, so that a page keeps showing
    what it last knew. Changes and downloads are never answered from memory, nor is `me`.
    """

    def __init__(self, http: httpx.Client, token: str | None, memory: Memory | None = None) -> None:
        self._http, self._token, self._memory = http, token, memory

    # Who asks

    def me(self) -> Json:
        """{"id", "name", "role"} of the token; always asked anew, so it also tells whether the service is there."""
        found: Json = self._request("GET", "/tokens/me").json()
        return found

    # Runs

    def runs(self, **query: Any) -> Json:
        """{"items", "next_cursor", "total"}, the total with the first part only.

        Lists become repeated parameters; None is left out.
        """
        return self._get("/runs", query)

    def run(self, run: str) -> Json:
        return self._get(f"/runs/{_part(run)}")

    def act(self, run: str, action: str, body: Json | None = None) -> Json:
        """`cancel`, `pause`, `resume`, `retry`, or `clone` with {"overrides": …}; the run afterwards."""
        return self._send("POST", f"/runs/{_part(run)}/{_part(action)}", body)

    def change(self, run: str, **changes: Any) -> Json:
        """Name, tags, notes, archived."""
        return self._send("PATCH", f"/runs/{_part(run)}", changes)

    def delete(self, run: str) -> None:
        self._send("DELETE", f"/runs/{_part(run)}")

    def submit(self, body: Json, key: str) -> Json:
        """Submit a run; the same `key` and body again give the same run."""
        return self._send("POST", "/runs", body, headers={"Idempotency-Key": key})

    def validate(self, body: Json) -> Json:
        return self._send("POST", "/runs/validate", body)

    # Groups and sweeps

    def groups(self) -> list[Json]:
        """The newest ones."""
        return list(self._get("/groups", {"limit": 200})["items"])

    def group(self, group: str) -> Json:
        return self._get(f"/groups/{_part(group)}")

    def sweep(self, body: Json, key: str) -> Json:
        return self._send("POST", "/sweeps", body, headers={"Idempotency-Key": key})

    def validate_sweep(self, body: Json) -> Json:
        return self._send("POST", "/sweeps/validate", body)

    # What a run reported

    def metrics(self, run: str, names: Sequence[str], x: str, after: int | None, max_points: int) -> Json:
        query = {"names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return self._get(f"/runs/{_part(run)}/metrics", query)

    def metrics_of(
        self, runs: Sequence[str], names: Sequence[str], x: str, after: int | None, max_points: int
    ) -> dict[str, Json]:
        """The same of several runs at once, by run."""
        query = {"runs": list(runs), "names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return dict(self._get("/metrics", query)["runs"])

    def metric_names(self, run: str) -> list[str]:
        return self._get_list(f"/runs/{_part(run)}/metrics/names")

    def events(self, run: str, after: int = 0, limit: int = 1000) -> Json:
        return self._get(f"/runs/{_part(run)}/events", {"after": after, "limit": limit})

    def logs(self, run: str, offset: int, limit: int = 65_536) -> Json:
        """A part of the log; a negative offset counts from its end."""
        return self._get(f"/runs/{_part(run)}/logs", {"offset": offset, "limit": limit})

    def samples(self, run: str, **query: Any) -> Json:
        return self._get(f"/runs/{_part(run)}/samples", query)

    def evaluations(self, run: str) -> list[Json]:
        """Records without the score of each problem, which no picture needs."""
        return list(self._get(f"/runs/{_part(run)}/evaluations", {"per_problem": False})["items"])

    def checkpoints(self, run: str) -> list[Json]:
        return list(self._get(f"/runs/{_part(run)}/checkpoints")["items"])

    def checkpoint_zip(self, run: str, step: int) -> bytes:
        return self._request("GET", f"/runs/{_part(run)}/checkpoints/{step}/download", timeout=600.0).content

    # Comparison and catalogue

    def compare(self, **query: Any) -> Json:
        return self._get("/compare", query)

    def heat_map(self, group: str, **query: Any) -> Json | None:
        """Cells of a sweep over two settings; None when it does not vary two."""
        try:
            return self._get(f"/groups/{_part(group)}/heatmap", query)
        except Refused as error:
            if error.status == 422:
                return None
            raise

    def export(self, runs: Sequence[str], form: str) -> bytes:
        """A zip file of the runs' metrics and evaluations as csv, parquet or jsonl."""
        return self._request("GET", "/export", params={"runs": list(runs), "format": form}, timeout=600.0).content

    def schema(self) -> Json:
        return self._get("/schema")

    def presets(self) -> list[Json]:
        return self._get_list("/presets")

    def published(self) -> Json:
        return self._get("/published")

    # The wire

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Json:
        found: Json = self._read(path, query)
        return found

    def _get_list(self, path: str) -> list[Any]:
        return list(self._read(path, None))

    def _read(self, path: str, query: Mapping[str, Any] | None) -> Any:
        """An answer, from memory while the service is away."""
        params = _clean(query)
        key = (path, tuple(params))
        if self._memory is None:
            return self._request("GET", path, params=params).json()
        if self._memory.away and key in self._memory.answers:
            return self._memory.answers[key]
        try:
            answer = self._request("GET", path, params=params).json()
        except ServiceUnavailable:
            self._memory.away = True
            if key in self._memory.answers:
                return self._memory.answers[key]
            raise
        self._memory.keep(key, answer)
        return answer

    def _send(self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None) -> Json:
        answer = self._request(method, path, json=body, headers=headers)
        found: Json = answer.json() if answer.content else {}
        return found

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        headers = dict(request.pop("headers", None) or {})
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            answer = self._http.request(method, path, headers=headers, **request)
        except httpx.TransportError as error:
            raise ServiceUnavailable(f"{self._http.base_url} does not answer ({type(error).__name__})") from error
        if answer.is_success:
            return answer
        raise _failure(answer)


def _failure(answer: httpx.Response) -> ServiceError:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    title, detail = str(body.get("title") or answer.reason_phrase), str(body.get("detail") or "")
    if answer.status_code in (502, 503, 504):
        return ServiceUnavailable(detail or title)
    if answer.status_code == 401:
        return NotSignedIn(detail or title)
    errors = [(str(item.get("field", "")), str(item.get("message", ""))) for item in body.get("errors") or []]
    return Refused(answer.status_code, title, detail, errors)


def _clean(query: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Query parameters: None and empty text left out, lists repeated, truth values as the API spells them."""

    def pairs() -> Iterator[tuple[str, str]]:
        for name, value in (query or {}).items():
            for item in value if isinstance(value, list | tuple) else [value]:
                if item is None or item == "":
                    continue
                yield name, str(item).lower() if isinstance(item, bool) else str(item)

    return list(pairs())


def _part(text: str) -> str:
    """One part of a path: what a visitor typed cannot climb out of it."""
    return quote(str(text), safe="").replace("..", "%2E%2E")
