"""Uploads a run's files to the service during training; the files are the queue, so nothing is buffered in memory.

A background thread makes the calls, so training never blocks on the service. The thread retries while the service is
unavailable and continues from the lines that the service has. Responses carry pause and cancel requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, sleep_using_event, stop_when_event_set, wait_random_exponential

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.uploader_batches import FILES, Batch, BatchQueue

ControlRequest = Literal["pause", "cancel"]
PREPARING = "preparing"
"""The first phase of a launch."""
_FENCED = (401, 403, 410)
_PROBLEMS = "/api/v1/problems#"
"""Beginning of `type` in the problems of the service; a proxy's 401 or 410 has none."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The service that a launch reports to. attempt: number of the launch. token: valid for this run and launch."""

    url: str
    run: str
    attempt: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. poll: interval of file checks; heartbeat: maximum time between calls; first_retry, last_retry: bounds
    of the exponential back-off; give_up: maximum wait at the end of a run; answer: HTTP timeout."""

    poll: float = 0.5
    heartbeat: float = 4.0
    first_retry: float = 0.5
    last_retry: float = 15.0
    give_up: float = 20.0
    answer: float = 10.0


def take_service(path: Path) -> ServiceAddress:
    """Read service.json ({"url", "run", "attempt", "token"}) and remove it. Raises ConfigError.

    All runs of a cluster have one account: what stays in its folder, the reward classes of other runs can read.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--service {path} cannot be read: {error}") from None
    values = body if isinstance(body, dict) else {}
    fields = {"url": str, "run": str, "attempt": int, "token": str}
    bad = [name for name, kind in fields.items() if not isinstance(values.get(name), kind) or not values[name]]
    if bad:
        raise ConfigError(
            f"--service {path}: {', '.join(bad)} must be set; the service writes this file at each launch"
        )
    address = ServiceAddress(values["url"], values["run"], values["attempt"], values["token"])
    try:
        url = httpx.URL(address.url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--service {path}: url = {address.url!r} is not a URL ({error})") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--service {path}: url = {address.url!r} must begin with http:// or https://")
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--service {path} cannot be removed: {error}") from None
    return address


class ServiceUnavailable(Exception):
    """The service cannot process the call now; retry."""


class Uploader:
    """The trainer's side of the protocol, in a background thread.

    Order: `start` (heartbeats begin), `follow` once the run's files are open for writing, then at any time `request`,
    `fenced` and `take_events`; `finish` at the end, when the files are complete, or `abandon`. The thread repeats
    `step` under `retrying`.
    """

    def __init__(self, service: ServiceAddress, out_dir: Path, timing: Timing | None = None) -> None:
        self.service = service
        self._timing = timing or Timing()
        self._queue = BatchQueue(out_dir, service.attempt)
        self._path = f"/api/v1/runs/{quote(service.run, safe='')}/ingest"
        url = httpx.URL(service.url)
        self._client = httpx.Client(
            base_url=service.url,
            headers={"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"},
            timeout=self._timing.answer,
            trust_env=url.host not in _LOOPBACK,  # never use a proxy for loopback
            verify=url.scheme == "https",  # loading certificates takes time
        )
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._wake = threading.Event()
        # The jitter spreads the calls of many runs after a restart of the service. A wake-up ends the back-off.
        self.retrying = Retrying(
            retry=retry_if_exception_type((ServiceUnavailable, httpx.HTTPError, OSError)),
            wait=wait_random_exponential(
                multiplier=self._timing.first_retry, max=self._timing.last_retry, min=self._timing.first_retry / 2
            ),
            sleep=sleep_using_event(self._wake),
            stop=stop_when_event_set(self._wake),
            retry_error_callback=lambda state: 0.0,
        )
        self._follow = self._finishing = self._synced = False
        self._called = -float("inf")
        self._phase, self._sent_phase = PREPARING, ""
        self._request: ControlRequest | None = None
        self._fenced: str | None = None
        self._delivered = self._ended = False

    # ---- called by the training thread ------------------------------------------------------------------------

    @property
    def request(self) -> ControlRequest | None:
        """The service's current pause or cancel request."""
        return self._request

    @property
    def fenced(self) -> str | None:
        """Why this launch may no longer report: another launch owns the run, or it was deleted. None while it may."""
        return self._fenced

    def take_events(self) -> list[str]:
        """Rejections since the last call, for events.jsonl."""
        events = self._queue.events
        return [events.popleft() for _ in range(len(events))]

    def start(self) -> None:
        self._thread.start()

    def enter_phase(self, phase: str) -> None:
        """Send a heartbeat with this phase, such as `training`, and repeat it with the later ones."""
        self._phase = phase
        self._wake.set()

    def follow(self) -> None:
        """Start sending the rows of the run's files."""
        self._follow = True
        self._wake.set()

    def finish(self, outcome: Mapping[str, Any] | None) -> bool:
        """Send the remaining rows and the outcome, for at most `give_up` seconds; returns whether all arrived."""
        self._queue.set_outcome(outcome)
        self._finishing = True
        self._wake.set()
        self._thread.join(self._timing.give_up)
        self._ended = True
        return self._delivered

    def abandon(self) -> None:
        """Stop calling the service."""
        self._ended = True
        self._wake.set()

    # ---- the background thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with closing(self._client):
            while not self._ended:
                delay = self.retrying(self.step)
                if delay > 0 and not self._ended:
                    self._wake.wait(delay)
                self._wake.clear()

    def step(self) -> float:
        """Make the next call if one is due; returns the seconds until the following one.

        Raises ServiceUnavailable, httpx.HTTPError or OSError for a call to retry.
        """
        if self._follow and not self._queue.following:
            # The lines of an earlier launch are final only now: ask the service for its offsets again.
            self._queue.following, self._synced = True, False
        # Read before the files, so that everything written before `finish` is sent.
        finishing = self._finishing
        batch = self._queue.next() if self._synced else None
        if batch is not None:
            self._call(batch.body, batch)
            return 0.0
        if self._synced and finishing:
            self._delivered = self._ended = True
            return 0.0
        phase, quiet_s = self._phase, time.monotonic() - self._called
        if not self._synced or phase != self._sent_phase or quiet_s >= self._timing.heartbeat:
            self._call(self._queue.body(phase=phase), None)
            self._sent_phase = phase
        return 0.0 if self._ended or self._finishing else self._timing.poll

    def _call(self, body: bytes, batch: Batch | None) -> None:
        self._called = time.monotonic()
        response = self._client.post(self._path, content=body)
        status, answer = response.status_code, _json(response)
        text = answer.get("detail") or answer.get("title") or response.text or response.reason_phrase
        message = f"{status}: {str(text)[:300]}"
        if status == 200:
            self._apply(answer, batch)
        elif status in _FENCED and not str(answer.get("type")).startswith(_PROBLEMS):
            raise ServiceUnavailable(f"not an answer of the service, but for example of a proxy ({message})")
        elif status == 410 and batch is not None and batch.content == "outcome":
            self._delivered = self._ended = True  # the response to an earlier attempt was lost
        elif status in _FENCED:
            self._fenced = f"the service no longer accepts reports of this launch ({message})"
            self._ended = True
        elif batch is not None and status == 409:
            offsets = _offsets(answer)
            if offsets is None or not self._queue.conflict(offsets):
                raise ServiceUnavailable(message)
        elif batch is not None and status in (400, 413, 422):
            self._queue.refuse(message, too_large=status == 413)
        else:
            raise ServiceUnavailable(message)

    def _apply(self, answer: Mapping[str, Any], batch: Batch | None) -> None:
        offsets = _offsets(answer)
        if offsets is None:
            raise ServiceUnavailable("not an answer of the service, but for example a proxy's page")
        request = answer.get("request")
        self._request = request if request in ("pause", "cancel") else None
        self._synced = True
        if batch is None:
            self._queue.seek(offsets)
        elif not self._queue.delivered(offsets):
            raise ServiceUnavailable("the batch was accepted, but not applied")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _offsets(answer: Mapping[str, Any]) -> dict[str, int] | None:
    offsets = answer.get("offsets")
    if not isinstance(offsets, dict) or not all(isinstance(offsets.get(kind), int) for kind in FILES):
        return None
    return {kind: offsets[kind] for kind in FILES}
