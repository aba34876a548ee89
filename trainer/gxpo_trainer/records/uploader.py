"""Sends a run's files to the service while it trains; the files are the queue, so nothing waits in memory.

Training never waits for the service: a thread of its own makes the calls, tries for ever while the service is
away, and goes on from the lines that the service says it has. The answers carry wishes back.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.records.uploader_batches import FILES, Batch, BatchQueue

Wish = Literal["pause", "cancel"]
_FENCED = (401, 403, 410)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where one launch of a run reports to. attempt: number of the launch. token: the run's own, for this launch."""

    url: str
    run: str
    attempt: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. poll: between looks at the files; heartbeat: longest silence; first_retry, last_retry: back-off;
    give_up: longest wait for the service at the end."""

    poll: float = 0.5
    heartbeat: float = 4.0
    first_retry: float = 0.5
    last_retry: float = 15.0
    give_up: float = 20.0
    answer: float = 10.0


def read_service(path: Path) -> ServiceAddress:
    """service.json: {"url", "run", "attempt", "token"}. Raises ConfigError naming the file and what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--service {path} cannot be read: {error}") from None
    values = found if isinstance(found, dict) else {}
    wanted = {"url": str, "run": str, "attempt": int, "token": str}
    bad = [name for name, kind in wanted.items() if not isinstance(values.get(name), kind) or not values[name]]
    if bad:
        raise ConfigError(
            f"--service {path}: {', '.join(bad)} must be set; the service writes this file at each launch"
        )
    address = ServiceAddress(values["url"], values["run"], values["attempt"], values["token"])
    try:
        url = httpx.URL(address.url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--service {path}: url = {address.url!r} is no address ({error})") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--service {path}: url = {address.url!r} must begin with http:// or https://")
    return address


class Uploader:
    """The trainer's side of the protocol, in a thread of its own.

    Order: `start` (heartbeats begin), `follow` once the run's files are open for writing, then at any time `wish`,
    `fenced` and `take_events`; `finish` at the end, when the files are complete, or `abandon`. `step` is what the
    thread repeats; without the thread a caller may repeat it.
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
            # A proxy of the environment cannot reach the loopback of this machine.
            trust_env=url.host not in _LOOPBACK,
            verify=url.scheme == "https",  # certificates are read only where they are used
        )
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._wake = threading.Event()
        self._follow = self._finishing = False
        self._greeted = False
        self._failures = 0
        self._called = -float("inf")
        self._wish: Wish | None = None
        self._fenced: str | None = None
        self._delivered = self._ended = False

    # ---- for the thread that trains ---------------------------------------------------------------------------

    @property
    def wish(self) -> Wish | None:
        """What the service last asked for."""
        return self._wish

    @property
    def fenced(self) -> str | None:
        """Why this launch may no longer report: another one owns the run, or the run is gone. None while it may."""
        return self._fenced

    def take_events(self) -> list[str]:
        """Refusals since the last call, for events.jsonl."""
        events = self._queue.events
        return [events.popleft() for _ in range(len(events))]

    def start(self) -> None:
        self._thread.start()

    def follow(self) -> None:
        """Send the rows of the run's files from now on."""
        self._follow = True
        self._wake.set()

    def finish(self, outcome: Mapping[str, Any] | None) -> bool:
        """Send the rest and the outcome; waits `give_up` seconds at most. True when the service has everything."""
        self._queue.end_with(outcome)
        self._finishing = True
        self._wake.set()
        self._thread.join(self._timing.give_up)
        self._ended = True
        return self._delivered

    def abandon(self) -> None:
        """Call no more."""
        self._ended = True
        self._wake.set()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with closing(self._client):
            while not self._ended:
                delay = self.step()
                if delay > 0 and not self._ended and self._wake.wait(delay):
                    self._wake.clear()
                    self._failures = 0

    def step(self) -> float:
        """Make the call that is due, if one is; returns the seconds until the next one may be."""
        if self._follow and not self._queue.following:
            # Only now are the lines final that an earlier launch left behind: ask again where to go on.
            self._queue.following, self._greeted = True, False
        try:
            # Asked for before the files are looked at: what is written before `finish` is sent.
            finishing = self._finishing
            batch = self._queue.next() if self._greeted else None
            if batch is not None:
                return self._call(batch.body, batch)
            if self._greeted and finishing:
                self._delivered = self._ended = True
                return 0.0
            if self._greeted and time.monotonic() - self._called < self._timing.heartbeat:
                return self._timing.poll
            return self._call(self._queue.heartbeat(), None)
        except (httpx.HTTPError, OSError):
            return self._again()

    def _call(self, body: bytes, batch: Batch | None) -> float:
        self._called = time.monotonic()
        response = self._client.post(self._path, content=body)
        if response.status_code == 200:
            return self._applied(response, batch)
        if response.status_code == 410 and batch is not None and batch.content == "outcome":
            self._delivered = self._ended = True  # the run ended by this outcome, whose first answer was lost
            return 0.0
        if response.status_code in _FENCED:
            self._fenced = f"the service no longer takes reports of this launch ({_message(response)})"
            self._ended = True
            return 0.0
        if batch is None:
            return self._again()
        if response.status_code == 409:
            offsets = _offsets(_json(response))
            return 0.0 if offsets is not None and self._queue.moved(offsets) else self._again()
        if response.status_code == 413:
            self._queue.too_large(_message(response))
            return 0.0
        if response.status_code in (400, 422):
            self._queue.refused(_message(response))
            return 0.0
        return self._again()

    def _applied(self, response: httpx.Response, batch: Batch | None) -> float:
        answer = _json(response)
        offsets = _offsets(answer)
        if offsets is None:  # a proxy's page, say, but not the service
            return self._again()
        wish = answer.get("wish")
        self._wish = wish if wish in ("pause", "cancel") else None
        self._greeted = True
        if batch is None:
            self._queue.move(offsets)
        elif not self._queue.delivered(offsets):
            return self._again()
        self._failures = 0
        return 0.0 if batch is not None or self._finishing else self._timing.poll

    def _again(self) -> float:
        """Exponential back-off; the jitter keeps many runs from calling a restarted service at once."""
        timing = self._timing
        delay = min(timing.last_retry, timing.first_retry * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return delay * random.uniform(0.5, 1.0)


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _offsets(answer: Mapping[str, Any]) -> dict[str, int] | None:
    found = answer.get("offsets")
    if not isinstance(found, dict) or not all(isinstance(found.get(kind), int) for kind in FILES):
        return None
    return {kind: found[kind] for kind in FILES}


def _message(response: httpx.Response) -> str:
    """The problem in the service's words, short."""
    answer = _json(response)
    text = answer.get("detail") or answer.get("title") or response.text or response.reason_phrase
    return f"{response.status_code}: {str(text)[:300]}"
