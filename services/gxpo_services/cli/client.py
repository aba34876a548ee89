"""Talking to the service over HTTP: what the commands need, with retries and messages for people.

ServiceError (GxpoError)     exit code 1: the service refused, or failed
├── RefusedRequest           exit code 2: what was asked cannot be used (422, 400); names every bad setting
├── NotThere                 404 or 410: no such thing
└── ServiceUnavailable              nothing answers at the address, or it answers that it cannot work now
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict
from urllib.parse import quote

import httpx

from gxpo_services.network.addresses import is_http, is_loopback
from gxpo_trainer.errors import ConfigError, GxpoError

API = "/api/v1"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_HOME = Path("gxpo-home")
TOKEN_FILE = "token"
STATE_FILE = "up.json"
"""What `gxpo up` writes into its home while it runs: where its parts are."""
_AWAY = (502, 503, 504)

Json = dict[str, Any]


class ServiceError(GxpoError):
    """The service refused a request; `status` is the HTTP status, None when there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RefusedRequest(ServiceError):
    """What was asked cannot be used."""

    exit_code = 2


class NotThere(ServiceError):
    """There is no such run, group or token."""


class ServiceUnavailable(ServiceError):
    """Nothing answers, or only that it cannot work now."""


class Progress(TypedDict):
    """How far a run has come; a budget that is not set is None."""

    fraction: float
    steps: int
    step_budget: int | None
    backward_passes: float
    backward_passes_budget: float | None
    tokens: float
    training_s: float
    seconds_left: float | None
    queue_position: int | None


class RunView(TypedDict):
    """The members of a run's answer that the commands read. Times are seconds since 1970."""

    id: str
    name: str
    state: str
    reason: str | None
    detail: str
    rule_label: str
    model: str
    seed: int
    tags: list[str]
    group: str | None
    created_by: str
    created_at: float
    recoveries: int
    progress: Progress
    score: float | None
    score_best: float | None
    reward: float | None
    possible_actions: list[str]


class RunDetail(RunView):
    """One run with its settings and what they will cost."""

    config: Json
    cost: Json


class ServiceClient:
    """A connection to one service. Use it as a context manager.

    patience_s: how long a request that may be repeated (reads; writes that carry a key) is tried again while
    nothing answers. transport: for tests.
    """

    def __init__(
        self, url: str, token: str | None, *, patience_s: float = 3.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(60.0, connect=5.0),
            transport=transport,
            trust_env=not is_loopback(self.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # Runs

    def submit(self, body: Json, key: str | None = None) -> RunDetail:
        """Make a run; a repeated request with one key makes one run."""
        made: RunDetail = self.post("/runs", body, key=key or secrets.token_hex(16))
        return made

    def run(self, run_id: str) -> RunDetail:
        found: RunDetail = self.get(run_path(run_id))
        return found

    def runs(self, *, limit: int | None = None, **filters: Any) -> list[RunView]:
        """All runs that the filters leave, page by page, at most `limit`."""
        found: list[RunView] = []
        cursor: str | None = None
        while True:
            size = 200 if limit is None else min(200, limit - len(found))
            page = self.get("/runs", limit=size, cursor=cursor, **filters)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(found) >= limit):
                return found

    def act(self, run_id: str, action: str, body: Json | None = None) -> RunDetail:
        """cancel, pause, resume, clone or retry. The first three may be repeated; the others carry a key."""
        headers = {"Idempotency-Key": secrets.token_hex(16)} if action in ("clone", "retry") else {}
        path = f"{run_path(run_id)}/{action}"
        answer: RunDetail = self._answer("POST", path, body=body, headers=headers, again=True)
        return answer

    # Requests

    def get(self, path: str, **query: Any) -> Any:
        return self._answer("GET", path, query=query, again=True)

    def post(self, path: str, body: Json | None = None, *, key: str | None = None) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return self._answer("POST", path, body=body, headers=headers, again=key is not None)

    def patch(self, path: str, body: Json) -> Any:
        return self._answer("PATCH", path, body=body)

    def delete(self, path: str) -> Any:
        return self._answer("DELETE", path)

    @contextmanager
    def stream(self, path: str, **query: Any) -> Iterator[tuple[str | None, Iterator[bytes]]]:
        """The file name that the service offers, and the bytes as they come: files need not fit the memory."""
        try:
            with self._http.stream("GET", API + path, params=_given(query)) as response:
                if response.is_error:
                    response.read()
                    raise _error_of(response)
                yield _offered_name(response), response.iter_bytes()
        except httpx.TransportError as error:
            raise self._away(error) from error

    def _answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> Any:
        give_up = time.monotonic() + (self._patience_s if again else 0.0)
        pause = 0.2
        while True:
            try:
                response = self._http.request(method, API + path, params=_given(query), json=body, headers=headers)
                problem: ServiceError | None = _error_of(response) if response.is_error else None
            except httpx.TransportError as error:
                problem = self._away(error)
            if problem is None:
                return response.json() if response.content else None
            if not isinstance(problem, ServiceUnavailable) or time.monotonic() + pause > give_up:
                raise problem
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _away(self, error: httpx.TransportError) -> ServiceUnavailable:
        what = str(error) or type(error).__name__
        return ServiceUnavailable(
            f"no service answers at {self.url} ({what}); start one with `gxpo up`, or name another with --url"
        )


def connect(
    url: str | None = None, token_file: Path | None = None, *, patience_s: float = 3.0, home: Path | None = None
) -> ServiceClient:
    """The client that arguments and environment name.

    Address: `url`, GXPO_URL, the service of `gxpo up` in this home, or 127.0.0.1:8000. Token: `token_file`,
    GXPO_TOKEN, or the home's token, which is for this machine's own service and is never sent elsewhere.
    """
    home = home or Path(os.environ.get("GXPO_HOME") or DEFAULT_HOME)
    address = url or os.environ.get("GXPO_URL") or running_url(home) or DEFAULT_URL
    if not is_http(address):
        raise ConfigError(f"the service's address {address!r} must look like {DEFAULT_URL}; check --url or GXPO_URL")
    return ServiceClient(address, _token(address, token_file, home), patience_s=patience_s)


def _token(address: str, token_file: Path | None, home: Path) -> str | None:
    if token_file is None and os.environ.get("GXPO_TOKEN"):
        return os.environ["GXPO_TOKEN"].strip()
    if token_file is None:
        token_file = home / TOKEN_FILE
        if not is_loopback(address) or not token_file.exists():
            return None
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {token_file} cannot be read ({error}); check --token-file") from None


def running_url(home: Path) -> str | None:
    """Where the `gxpo up` of a home serves, None when none has written it down."""
    import json

    try:
        url = json.loads((home / STATE_FILE).read_text(encoding="utf-8")).get("url")
    except (OSError, ValueError, AttributeError):
        return None
    return url if isinstance(url, str) else None


def run_path(run_id: str) -> str:
    return f"/runs/{quote(run_id, safe='')}"


def _offered_name(response: httpx.Response) -> str | None:
    message = Message()
    message["Content-Disposition"] = response.headers.get("Content-Disposition", "")
    return message.get_filename()


def _given(query: Mapping[str, Any] | None) -> httpx.QueryParams:
    """Query parameters without those that are None; a list becomes a repeated parameter."""
    pairs: list[tuple[str, str | int | float | bool | None]] = []
    for name, value in (query or {}).items():
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if item is not None:
                pairs.append((name, str(item).lower() if isinstance(item, bool) else str(item)))
    return httpx.QueryParams(pairs)


def _error_of(response: httpx.Response) -> ServiceError:
    """Problem details as one message, with a line for every bad setting."""
    try:
        body = response.json()
    except ValueError:
        body = None
    body = body if isinstance(body, dict) else {}
    title = str(body.get("title") or response.reason_phrase or "error")
    detail = str(body.get("detail") or title)
    lines = [f"  {item.get('field')}: {item.get('message')}" for item in body.get("errors") or []]
    status = response.status_code
    if status == 401:
        detail += " (--token-file FILE or GXPO_TOKEN)"
    if status == 413 or status >= 500:
        detail = f"the service answered {status}: {detail}"
    if lines:
        # The detail of a refused body may be the same list in one line.
        detail = "\n".join([title if str(body["errors"][0].get("message")) in detail else detail, *lines])
    if status in _AWAY:
        return ServiceUnavailable(detail, status)
    kind = {400: RefusedRequest, 422: RefusedRequest, 404: NotThere, 410: NotThere}.get(status, ServiceError)
    return kind(detail, status)
