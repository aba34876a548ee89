"""A service that takes a run's rows, on loopback: the other side of docs/service-protocol.md, with its faults."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from gxpo_services.api.fields import read_json
from support.recording_server import RecordingServer, Request

KINDS = ("metrics", "samples", "evaluations", "events")


class IngestServer(RecordingServer):
    """`rows` is what was applied. Faults are taken from `faults`, one a call, first thing first:

    "ok"      nothing
    "500"     an error, nothing applied
    "reset"   the connection ends before anything is applied
    "lost"    the batch is applied, then the connection ends without an answer
    "page"    200 and an unrelated page

    most_bytes: larger calls are answered 413. bad: a row for which this is true is answered 422. token: the one that is
    let in; others get 401. over: every call gets 410. watch: is called with the server before each answer.
    """

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.token = "secret"
        self.faults: deque[str] = deque()
        self.most_bytes = 1 << 30
        self.bad: Any = lambda kind, row: False
        self.over = False
        self.request: str | None = None
        self.watch: Callable[[IngestServer], None] = lambda server: None
        self.calls: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.lock = threading.Lock()
        self.rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self.batches: dict[int, int] = {}
        self.identity: Any = None
        self.outcome: Any = None

    def _respond(self, request: Request) -> tuple[int, bytes] | None:
        with self.lock:
            answer = self._answer(request)
        if answer is None:
            return None
        status, content = answer
        self.statuses.append(status)
        return status, content if isinstance(content, bytes) else json.dumps(content).encode()

    def forget(self, kind: str, number: int) -> None:
        """A database that was restored from before the last `number` rows."""
        with self.lock:
            del self.rows[kind][max(0, len(self.rows[kind]) - number) :]

    @property
    def offsets(self) -> dict[str, int]:
        return {kind: len(rows) for kind, rows in self.rows.items()}

    def _answer(self, request: Request) -> tuple[int, Any] | None:
        """Status and content; None: the connection ends."""
        fault = self.faults.popleft() if self.faults else "ok"
        if fault == "reset":
            return None
        if fault == "500":
            return 500, {"title": "Internal Server Error"}
        if fault == "page":
            return 200, b"<html>Welcome</html>"
        if fault in ("401", "410"):
            return int(fault), b"<html>the proxy wants another sign-in</html>"
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            kind = "/api/v1/problems#unauthorized"
            return 401, {"type": kind, "title": "Unauthorized", "detail": "another launch owns the run"}
        if self.over:
            return 410, {"type": "/api/v1/problems#gone", "title": "Gone"}
        if len(request.body) > self.most_bytes:
            return 413, {"title": "Content Too Large"}
        call = read_json(request.body)
        self.calls.append({"path": request.path, **call})
        status, content = self._apply(call)
        return None if fault == "lost" else (status, content)

    def _apply(self, call: dict[str, Any]) -> tuple[int, Any]:
        applied = False
        key = (call["attempt"], call["batch"])
        if call["batch"] is not None and key not in self.batches:
            for kind in KINDS:
                for row in call[kind]:
                    if row is not None and self.bad(kind, row):
                        return 422, {"title": "Unprocessable Content", "detail": f"{kind}: a bad row"}
            if any(call["offsets"][kind] > len(self.rows[kind]) for kind in KINDS):
                return 409, {"title": "Conflict", "offsets": self.offsets}
            for kind in KINDS:
                self.rows[kind] += call[kind][len(self.rows[kind]) - call["offsets"][kind] :]
            self.identity = call["identity"] or self.identity
            self.outcome = call["outcome"] or self.outcome
            self.batches[key] = 1
            applied = True
        self.watch(self)
        return 200, {"applied": applied, "offsets": self.offsets, "request": self.request}
