"""The files of a run as a queue of batches for the service, without HTTP, clocks or threads.

    {"attempt": launch number, "batch": 1, 2, 3, … in this launch, null for a heartbeat,
     "phase": what the launch is doing, in heartbeats,
     "offsets": {kind: lines of the file before this batch's rows},
     "metrics": [rows], "samples": [rows], "evaluations": [rows], "events": [rows],
     "identity": run.json or null, "outcome": outcome.json or null}

Rows are the lines as stored on disk. A null row replaces a line that the service rejected or that is not a JSON object;
it counts as a line. docs/service-protocol.md describes the protocol.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gxpo_trainer.reporting.reading import EVALUATIONS, EVENTS, IDENTITY, METRICS, SAMPLES

FILES = {"metrics": METRICS, "evaluations": EVALUATIONS, "events": EVENTS, "samples": SAMPLES}
"""Kinds of rows, the most time-critical first."""
MAX_ROWS = 200
"""Rows of one kind in a batch."""
MAX_BYTES = 1_000_000
MAX_EVENTS = 20
"""Rejections recorded as events, so that a service that rejects everything cannot fill events.jsonl."""


class LineTail:
    """A growing file of lines that can be read from any line. Unterminated lines are ignored; so is a missing file.

    The byte at which each line begins is kept, so seeking reads nothing twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self._starts = array("q", [0])

    def seek(self, line: int) -> None:
        """Go to a line, or past the last whole line if the file is shorter."""
        self.line = len(self._starts) - 1
        if line > self.line and self._has_more():
            with self.path.open("rb") as file:
                file.seek(self._starts[-1])
                for text in islice(file, line - self.line):
                    if not text.endswith(b"\n"):
                        break
                    self._starts.append(self._starts[-1] + len(text))
        self.line = min(line, len(self._starts) - 1)

    def peek(self, max_lines: int, max_bytes: int, *, at_least_one: bool) -> list[bytes]:
        """The next lines without newlines, without moving. at_least_one: return one line even above `max_bytes`.

        They are on disk: after a power cut the file must not hold fewer lines than the service received.
        """
        if max_lines < 1 or not self._has_more():
            return []
        lines: list[bytes] = []
        size = 0
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            file.seek(self._starts[self.line])
            while len(lines) < max_lines and (line := file.readline()).endswith(b"\n"):
                size += len(line)
                if size > max_bytes and (lines or not at_least_one):
                    break
                lines.append(line[:-1])
        return lines

    def _has_more(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > self._starts[self.line]


@dataclass(frozen=True, slots=True)
class Batch:
    """One numbered call.

    rows: (kind, line number from 0) of each row, empty for an identity or an outcome; num_bytes: their total size.
    version: of the identity, to detect changes.
    """

    content: Literal["rows", "identity", "outcome"]
    body: bytes
    rows: tuple[tuple[str, int], ...] = ()
    num_bytes: int = 0
    version: object = None


class BatchQueue:
    """Batches of the lines that the service does not have yet.

    `next` returns the same batch until it is answered: `delivered` (200), `conflict` (409) or `refuse` (400, 413, 422).
    Batches are idempotent by number: if a response is lost, sending the batch again returns the
    current offsets. Identity and outcome get batches of their own, so that a rejected batch of rows can be bisected
    down to the invalid row.
    """

    def __init__(self, out_dir: Path, attempt: int) -> None:
        self._out_dir, self._attempt = out_dir, attempt
        self._tails = {kind: LineTail(out_dir / name) for kind, name in FILES.items()}
        self._number = 1
        self._current: Batch | None = None
        self._max_rows, self._max_bytes = MAX_ROWS * len(FILES), MAX_BYTES
        self._skipped: set[tuple[str, int]] = set()
        self._closed: set[str] = set()
        self._identity_version: object = None
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
        if batch.content == "identity":
            self._identity_version = batch.version
        elif batch.content == "outcome":
            self._outcome = None
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

    def refuse(self, message: str, *, too_large: bool) -> None:
        """Halve the size of batches, or their rows to find the invalid one; skip a single row."""
        batch = self._take()
        if len(batch.rows) <= 1:
            self._skip(batch, message)
        elif too_large:
            self._max_bytes = batch.num_bytes // 2
        else:
            self._max_rows = len(batch.rows) // 2

    def _take(self) -> Batch:
        batch, self._current = self._current, None
        assert batch is not None, "no batch in flight"
        return batch

    def _skip(self, batch: Batch, message: str) -> None:
        if batch.content == "identity":
            self._identity_version = batch.version
            what = f"{IDENTITY} was rejected"
        elif batch.content == "outcome":
            self._outcome = None
            what = "the outcome was rejected"
        else:
            (row,) = batch.rows
            kind, line = row
            what = f"{FILES[kind]}, line {line + 1} was rejected and skipped"
            if row in self._skipped:
                self._closed.add(kind)
                what = f"{FILES[kind]}: an empty row was rejected too; this file is no longer sent"
            self._skipped.add(row)
        self._num_rejections += 1
        if self._num_rejections <= MAX_EVENTS:
            last = "; further rejections are not recorded" if self._num_rejections == MAX_EVENTS else ""
            self.events.append(f"{what}: {message}{last}")

    def _identity(self) -> Batch | None:
        path = self._out_dir / IDENTITY
        if not path.exists():
            return None
        status = path.stat()
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version == self._identity_version:
            return None
        content = path.read_bytes()
        if not _is_object(content):
            return None
        return Batch("identity", self.body(self._number, identity=content), version=version)

    def _rows(self) -> Batch | None:
        lines: dict[str, list[bytes]] = {}
        rows: list[tuple[str, int]] = []
        size = 0
        for kind, tail in self._tails.items():
            if kind in self._closed:
                continue
            limit = min(MAX_ROWS, self._max_rows - len(rows))
            texts = tail.peek(limit, self._max_bytes - size, at_least_one=not rows)
            added = [(kind, tail.line + index) for index in range(len(texts))]
            lines[kind] = [
                text if _is_object(text) and row not in self._skipped else b"null"
                for text, row in zip(texts, added, strict=True)
            ]
            rows += added
            size += sum(map(len, texts))
        return Batch("rows", self.body(self._number, lines), tuple(rows), size) if rows else None

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
