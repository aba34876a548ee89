"""Uploads a run's files to the service during training; the files are the queue, so nothing is buffered in memory.

A background thread makes the calls, so training never blocks on the service. The thread retries while the service is
unavailable and continues from the lines that the service has. Responses carry pause and cancel requests. `BatchQueue`
is the part without HTTP, clocks and threads.

Rows are the lines as stored on disk. A null row replaces a line that the service rejected or that is not a JSON object;
it counts as a line. docs/service-protocol.md describes the protocol and the parts of a batch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, sleep_using_event, stop_when_event_set, wait_random_exponential

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.reading import EVALUATIONS, EVENTS, IDENTITY, METRICS, SAMPLES, lines_from

ControlRequest = Literal["pause", "cancel"]
PREPARING = "preparing"
"""The first phase of a launch."""
_FENCED = (401, 403, 410)
_PROBLEMS = "/api/v1/problems#"
"""Beginning of `type` in the problems of the service; a proxy's 401 or 410 has none."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
FILES = {"metrics": METRICS, "evaluations": EVALUATIONS, "events": EVENTS, "samples": SAMPLES}
"""Kinds of rows, the most time-critical first."""
MAX_ROWS = 200
"""Rows of one kind in a batch."""
MAX_BYTES = 1_000_000
MAX_EVENTS = 20
"""Rejections recorded as events, so that a service that rejects everything cannot fill events.jsonl."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The service that a launch reports to. attempt: number of the launch. token: valid for this run and launch. after:
    the trainer's newest attempt that the service has rows of."""

    url: str
    run: str
    attempt: int
    token: str = field(repr=False)
    after: int = 0


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
    """Read service.json ({"url", "run", "attempt", "token", "after"}) and remove it. Raises ConfigError.

    All runs of a cluster have one account: what stays in its folder, the reward classes of other runs can read.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        address = ServiceAddress(body["url"], body["run"], body["attempt"], body["token"], body.get("after", 0))
        path.unlink()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--service {path} cannot be used ({type(error).__name__}: {error}); the service writes it at each launch"
        ) from None
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
        self.request: ControlRequest | None = None
        """The service's current pause or cancel request."""
        self.fenced: str | None = None
        """Why this launch may no longer report: another launch owns the run, or it was deleted. None while it may."""
        self._delivered = self._ended = False

    # ---- called by the training thread ------------------------------------------------------------------------

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
            self.fenced = f"the service no longer accepts reports of this launch ({message})"
            self._ended = True
        elif batch is not None and status == 409:
            offsets = _offsets(answer)
            if offsets is None or not self._queue.conflict(offsets):
                raise ServiceUnavailable(message)
        elif batch is not None and status in (400, 413, 422):
            self._queue.refuse(message)
        else:
            raise ServiceUnavailable(message)

    def _apply(self, answer: Mapping[str, Any], batch: Batch | None) -> None:
        offsets = _offsets(answer)
        if offsets is None:
            raise ServiceUnavailable("not an answer of the service, but for example a proxy's page")
        request = answer.get("request")
        self.request = request if request in ("pause", "cancel") else None
        self._synced = True
        if batch is None:
            self._queue.seek(offsets)
        elif not self._queue.delivered(offsets):
            raise ServiceUnavailable("the batch was accepted, but not applied")


def _json(response: httpx.Response) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(body := response.json(), dict):
            return body
    return {}


def _offsets(answer: Mapping[str, Any]) -> dict[str, int] | None:
    offsets = answer.get("offsets")
    if not isinstance(offsets, dict) or not all(isinstance(offsets.get(kind), int) for kind in FILES):
        return None
    return {kind: offsets[kind] for kind in FILES}


class LineTail:
    """A growing file of lines that can be read from any line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self._begin = 0
        """Byte at which `line` begins."""

    def seek(self, line: int) -> None:
        """Go to a line, or past the last whole line if the file is shorter."""
        if line < self.line:
            self.line = self._begin = 0
        for _, end in islice(lines_from(self.path, self._begin), line - self.line):
            self.line, self._begin = self.line + 1, end

    def peek(self, max_lines: int, max_bytes: int, *, at_least_one: bool) -> list[bytes]:
        """The next lines without newlines, without moving. at_least_one: return one line even above `max_bytes`."""
        lines: list[bytes] = []
        size = 0
        for line, _ in islice(lines_from(self.path, self._begin), max_lines):
            size += len(line)
            if size > max_bytes and (lines or not at_least_one):
                break
            lines.append(line)
        if lines:  # after a power cut the file must not hold fewer lines than the service received
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return lines


@dataclass(frozen=True, slots=True)
class Batch:
    """One numbered call.

    rows: (kind, line number from 0) of each row, empty for an identity or an outcome. identity: to detect changes.
    """

    content: Literal["rows", "identity", "outcome"]
    body: bytes
    rows: tuple[tuple[str, int], ...] = ()
    identity: bytes = b""


class BatchQueue:
    """Batches of the lines that the service does not have yet.

    `next` returns the same batch until the service responds: `delivered` (200), `conflict` (409) or `refuse` (400, 413,
    422). Batches are idempotent by number: if a response is lost, sending the batch again returns the current offsets.
    Identity and outcome get batches of their own, so that a rejected batch of rows can be bisected down to the invalid
    row.
    """

    def __init__(self, out_dir: Path, attempt: int) -> None:
        self._out_dir, self._attempt = out_dir, attempt
        self._tails = {kind: LineTail(out_dir / name) for kind, name in FILES.items()}
        self._number = 1
        self._current: Batch | None = None
        self._max_rows = MAX_ROWS * len(FILES)
        self._skipped: set[tuple[str, int]] = set()
        self._sent_identity = b""
        self._outcome: Mapping[str, Any] | None = None
        self._num_rejections = 0
        self.following = False
        """Whether rows and identity are sent; False until the run's files are open for writing."""
        self.events: deque[str] = deque()
        """Messages about rejections, to be written to events.jsonl."""

    @property
    def offsets(self) -> dict[str, int]:
        return {kind: tail.line for kind, tail in self._tails.items()}

    def set_outcome(self, outcome: Mapping[str, Any] | None) -> None:
        """Send the outcome as the last batch, after the last row."""
        self._outcome = outcome

    def next(self) -> Batch | None:
        """The batch to send now, None when the service has everything."""
        # Read before the files, so that rows written before `set_outcome` are sent first.
        outcome = self._outcome
        if self._current is None and self.following:
            self._current = self._identity() or self._rows()
        if self._current is None and outcome is not None:
            self._current = Batch("outcome", self.body(self._number, outcome=json.dumps(outcome).encode()))
        return self._current

    def seek(self, offsets: Mapping[str, int]) -> None:
        """Continue from the service's offsets."""
        for kind, line in offsets.items():
            if kind in self._tails:
                self._tails[kind].seek(line)

    def delivered(self, offsets: Mapping[str, int]) -> bool:
        """Record that the current batch was applied. Returns False if its rows did not advance the offsets."""
        batch, before = self._take(), self.offsets
        self._forget(batch)
        self._number += 1
        self._max_rows = min(MAX_ROWS * len(FILES), self._max_rows * 2)
        self.seek(offsets)
        return batch.content != "rows" or self.offsets != before

    def conflict(self, offsets: Mapping[str, int]) -> bool:
        """Continue from the service's offsets, which differ from the batch's. Returns False if they are unchanged."""
        before = self.offsets
        self._take()
        self.seek(offsets)
        return self.offsets != before

    def refuse(self, message: str) -> None:
        """Halve the batch, to fit it in or to find the invalid row; skip a single row."""
        batch = self._take()
        if len(batch.rows) > 1:
            self._max_rows = len(batch.rows) // 2
            return
        self._forget(batch)
        what = f"{IDENTITY} was rejected" if batch.content == "identity" else "the outcome was rejected"
        for kind, line in batch.rows:
            what = f"{FILES[kind]}, line {line + 1} was rejected and skipped"
            self._skipped.add((kind, line))
        self._num_rejections += 1
        if self._num_rejections <= MAX_EVENTS:
            last = "; further rejections are not recorded" if self._num_rejections == MAX_EVENTS else ""
            self.events.append(f"{what}: {message}{last}")

    def _forget(self, batch: Batch) -> None:
        """Send an identity or outcome no more: the service has it, or rejects it."""
        if batch.content == "identity":
            self._sent_identity = batch.identity
        elif batch.content == "outcome":
            self._outcome = None

    def _take(self) -> Batch:
        batch, self._current = self._current, None
        assert batch is not None, "no batch in flight"
        return batch

    def _identity(self) -> Batch | None:
        path = self._out_dir / IDENTITY
        content = path.read_bytes() if path.exists() else b""
        if content == self._sent_identity or not _is_object(content):
            return None
        return Batch("identity", self.body(self._number, identity=content), identity=content)

    def _rows(self) -> Batch | None:
        lines: dict[str, list[bytes]] = {}
        rows: list[tuple[str, int]] = []
        size = 0
        for kind, tail in self._tails.items():
            limit = min(MAX_ROWS, self._max_rows - len(rows))
            texts = tail.peek(limit, MAX_BYTES - size, at_least_one=not rows)
            added = [(kind, tail.line + index) for index in range(len(texts))]
            lines[kind] = [
                text if _is_object(text) and row not in self._skipped else b"null"
                for text, row in zip(texts, added, strict=True)
            ]
            rows += added
            size += sum(map(len, texts))
        return Batch("rows", self.body(self._number, lines), tuple(rows)) if rows else None

    def body(
        self,
        number: int | None = None,
        rows: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
        *,
        identity: bytes = b"null",
        outcome: bytes = b"null",
        phase: str | None = None,
    ) -> bytes:
        """JSON body of a call, by default of a heartbeat. Lines are inserted as bytes, exactly as on disk."""
        values = {"attempt": self._attempt, "batch": number, "phase": phase, "offsets": self.offsets}
        head = json.dumps(values)[:-1].encode()
        parts = [b', "%s": [%s]' % (kind.encode(), b",".join(rows.get(kind, ()))) for kind in FILES]
        return b"".join([head, *parts, b', "identity": ', identity, b', "outcome": ', outcome, b"}"])


def _is_object(text: bytes) -> bool:
    """Whether a line is a JSON object, without the NaN and infinities that `json` takes by default."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not valid JSON")

    try:
        return isinstance(json.loads(text, parse_constant=reject), dict)
    except ValueError:
        return False
