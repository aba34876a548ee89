"""The files of a run as a queue of batches for the service; knows nothing of HTTP, clocks and threads.

    {"attempt": launch number, "batch": 1, 2, 3, … in this launch, null for a heartbeat,
     "offsets": {kind: lines of the file before this batch's rows},
     "metrics": [rows], "samples": [rows], "evaluations": [rows], "events": [rows],
     "identity": run.json or null, "outcome": outcome.json or null}

Rows are the lines as they are on the disk. A row that is null stands for a line that the service refused, or
that is no JSON object: it counts as a line and carries nothing. docs/service-protocol.md has the whole protocol.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.records.reading import EVALUATIONS, EVENTS, IDENTITY, METRICS, SAMPLES

FILES = {"metrics": METRICS, "evaluations": EVALUATIONS, "events": EVENTS, "samples": SAMPLES}
"""Kinds of rows, those that a person waits for first."""
MOST_ROWS = 200
"""Rows of one kind in a batch."""
MOST_BYTES = 1_000_000
MOST_EVENTS = 20
"""Refusals that are recorded one by one; a service that refuses everything must not fill events.jsonl."""
_BLOCK = 1 << 18


class LineTail:
    """A growing file of lines, read from any line on. Only whole lines count; a missing file has none.

    Byte positions of lines are kept along the way, one a block, so that going forward reads nothing twice and
    going back reads one block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self._byte = 0
        self._marks = [(0, 0)]

    def seek(self, line: int) -> None:
        """Go to a line, or behind the last whole one when there are not that many yet."""
        if line < self.line:
            self.line, self._byte = self._marks[bisect.bisect_right(self._marks, (line, math.inf)) - 1]
        if line == self.line or not self._has_more():
            return
        with self.path.open("rb") as file:
            file.seek(self._byte)
            begin = self._byte
            while self.line < line and (block := file.read(_BLOCK)):
                self._pass(block, begin, line - self.line)
                begin += len(block)

    def peek(self, most_lines: int, most_bytes: int, *, at_least_one: bool) -> list[bytes]:
        """The next lines without their newlines; the position stays. at_least_one: even when it is too long."""
        if most_lines < 1 or not self._has_more():
            return []
        lines: list[bytes] = []
        size = 0
        with self.path.open("rb") as file:
            file.seek(self._byte)
            while len(lines) < most_lines and (line := file.readline()).endswith(b"\n"):
                size += len(line)
                if size > most_bytes and (lines or not at_least_one):
                    break
                lines.append(line[:-1])
        return lines

    def _has_more(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > self._byte

    def _pass(self, block: bytes, begin: int, most: int) -> None:
        """Move over at most `most` line ends of a block that begins at byte `begin`."""
        found = block.count(b"\n")
        if found <= most:
            end = block.rfind(b"\n") + 1
        else:
            found, end = most, 0
            for _ in range(most):
                end = block.index(b"\n", end) + 1
        if found:
            self.line, self._byte = self.line + found, begin + end
            if self._byte - self._marks[-1][1] >= _BLOCK:
                self._marks.append((self.line, self._byte))


@dataclass(frozen=True, slots=True)
class Batch:
    """One numbered call.

    rows: (kind, line number from 0) of each row, and num_bytes of them all; none for an identity or an outcome.
    version: of the identity, to tell when it changed.
    """

    content: Literal["rows", "identity", "outcome"]
    body: bytes
    rows: tuple[tuple[str, int], ...] = ()
    num_bytes: int = 0
    version: object = None


class BatchQueue:
    """What the service does not have yet, batch by batch.

    `next` gives the same batch again until it is answered: `delivered` (200), `moved` (409), `too_large` (413) or
    `refused` (422). A batch whose answer was lost may have been applied; sent again under its number it does
    nothing, and the answer says where to go on. Identity and outcome travel alone, so that a batch that is
    refused can be halved down to the row that is to blame.
    """

    def __init__(self, out_dir: Path, attempt: int) -> None:
        self._out_dir, self._attempt = out_dir, attempt
        self._tails = {kind: LineTail(out_dir / name) for kind, name in FILES.items()}
        self._number = 1
        self._current: Batch | None = None
        self._most_rows, self._most_bytes = MOST_ROWS * len(FILES), MOST_BYTES
        self._aside: set[tuple[str, int]] = set()
        self._closed: set[str] = set()
        self._identity_version: object = None
        self._outcome: Mapping[str, Any] | None = None
        self._num_refusals = 0
        self.following = False
        """Whether rows and identity are sent; False until the run's files are open for writing."""
        self.events: deque[str] = deque()
        """What was refused, in words; whoever writes events.jsonl takes them from here."""

    @property
    def offsets(self) -> dict[str, int]:
        return {kind: tail.line for kind, tail in self._tails.items()}

    def heartbeat(self) -> bytes:
        return self._body(None, {})

    def end_with(self, outcome: Mapping[str, Any] | None) -> None:
        """The outcome follows as the last batch, after the last row."""
        self._outcome = outcome

    def next(self) -> Batch | None:
        """The batch that is to be sent now, None when the service has everything."""
        # Read before the files are: rows that were written before the outcome was given go first.
        outcome = self._outcome
        if self._current is None and self.following:
            self._current = self._identity() or self._rows()
        if self._current is None and outcome is not None:
            body = self._body(self._number, {}, outcome=json.dumps(outcome).encode())
            self._current = Batch("outcome", body)
        return self._current

    def move(self, offsets: Mapping[str, int]) -> None:
        """Go on from the lines that the service has."""
        for kind, line in offsets.items():
            if kind in self._tails:
                self._tails[kind].seek(line)

    def delivered(self, offsets: Mapping[str, int]) -> bool:
        """The batch in hand was applied, now or before. False when the service stands where it stood."""
        batch, before = self._take(), self.offsets
        if batch.content == "identity":
            self._identity_version = batch.version
        elif batch.content == "outcome":
            self._outcome = None
        self._number += 1
        self._most_rows = min(MOST_ROWS * len(FILES), self._most_rows * 2)
        self.move(offsets)
        return batch.content != "rows" or self.offsets != before

    def moved(self, offsets: Mapping[str, int]) -> bool:
        """The batch began behind what the service has. False when that is no news, and so would not end."""
        before = self.offsets
        self._take()
        self.move(offsets)
        return self.offsets != before

    def too_large(self, message: str) -> None:
        """The service takes no batch of this size: smaller ones from now on."""
        batch = self._take()
        if len(batch.rows) > 1:
            self._most_bytes = batch.num_bytes // 2
        else:
            self._set_aside(batch, message)

    def refused(self, message: str) -> None:
        """The service refuses a row of the batch: half as many next time; a row that is alone is left out."""
        batch = self._take()
        if len(batch.rows) > 1:
            self._most_rows = len(batch.rows) // 2
        else:
            self._set_aside(batch, message)

    def _take(self) -> Batch:
        batch, self._current = self._current, None
        assert batch is not None, "an answer without a call"
        return batch

    def _set_aside(self, batch: Batch, message: str) -> None:
        if batch.content == "identity":
            self._identity_version = batch.version
            what = f"{IDENTITY} was refused"
        elif batch.content == "outcome":
            self._outcome = None
            what = "the outcome was refused"
        else:
            (place,) = batch.rows
            kind, line = place
            what = f"{FILES[kind]}, line {line + 1} was refused and is left out there"
            if place in self._aside:
                self._closed.add(kind)
                what = f"{FILES[kind]}: not even an empty row was taken; no more of it is sent"
            self._aside.add(place)
        self._num_refusals += 1
        if self._num_refusals < MOST_EVENTS:
            self.events.append(f"{what}: {message}")
        elif self._num_refusals == MOST_EVENTS:
            self.events.append(f"{what}: {message}; further refusals are not recorded")

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
        return Batch("identity", self._body(self._number, {}, identity=content), version=version)

    def _rows(self) -> Batch | None:
        lines: dict[str, list[bytes]] = {}
        places: list[tuple[str, int]] = []
        size = 0
        for kind, tail in self._tails.items():
            if kind in self._closed:
                continue
            most = min(MOST_ROWS, self._most_rows - len(places))
            found = tail.peek(most, self._most_bytes - size, at_least_one=not places)
            rows = [(kind, tail.line + index) for index in range(len(found))]
            lines[kind] = [_row(line, place in self._aside) for line, place in zip(found, rows, strict=True)]
            places += rows
            size += sum(map(len, found))
        if not places:
            return None
        return Batch("rows", self._body(self._number, lines), tuple(places), size)

    def _body(
        self,
        number: int | None,
        rows: Mapping[str, Sequence[bytes]],
        *,
        identity: bytes = b"null",
        outcome: bytes = b"null",
    ) -> bytes:
        """The call's JSON. Lines go in as bytes: what is on the disk is what arrives."""
        head = json.dumps({"attempt": self._attempt, "batch": number, "offsets": self.offsets})[:-1].encode()
        parts = [b', "%s": [%s]' % (kind.encode(), b",".join(rows.get(kind, ()))) for kind in FILES]
        return b"".join([head, *parts, b', "identity": ', identity, b', "outcome": ', outcome, b"}"])


def _row(line: bytes, aside: bool) -> bytes:
    """The line, or null where it is to be left out or would spoil the batch."""
    return b"null" if aside or not _is_object(line) else line


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_number), dict)
    except ValueError:
        return False


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
