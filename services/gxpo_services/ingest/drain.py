"""Ingest the lines that a trainer did not send from the run's folder, after its launch is over.

The trainer may still send the same lines; the line offsets ensure that each is applied once.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy.orm import Session

from gxpo_services.api.errors import Invalid
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.ingest import batches
from gxpo_services.ingest.reports import apply_batch
from gxpo_services.outputs import events
from gxpo_services.outputs.files import RunFiles
from gxpo_services.runs import service
from gxpo_services.runs.lifecycle import Outcome, StateChanged

FILES: dict[batches.Kind, str] = {
    "metrics": "metrics.jsonl",
    "evaluations": "evaluations.jsonl",
    "samples": "samples.jsonl",
    "events": "events.jsonl",
}
"""Metrics first: they define the step from which an attempt replaces earlier ones."""
IDENTITY, OUTCOME = "run.json", "outcome.json"
ACTOR = "scheduler"
_MOST_ROWS = 500
_MOST_BYTES = 2_000_000
_LONGEST_LINE = 8 * 1024 * 1024
_Line = tuple[Any, str | None, int]
"""The row, the reason why it is skipped (or None), and its length in bytes."""


def drain(database: Database, run_id: str, folder: Path, launch: int, lease_token: int) -> Outcome | None:
    """Apply the lines of a run's files that the database lacks; returns the outcome of `launch`, if any.

    An invalid line is skipped and recorded as an event. Each transaction applies some of the lines, so the run's row
    is not locked long; a crash in between needs no repair. Raises StateChanged when the run is under another lease or
    launch, or deleted.
    """
    run = _Leased(database, run_id, launch, lease_token)
    files = RunFiles(folder.parent, folder.name)
    for kind, name in FILES.items():
        with suppress(FileNotFoundError), files.open(name) as file:
            _drain_file(run, kind, name, file)
    if isinstance(identity := _read(files, IDENTITY), dict):
        with run.locked() as (session, row):
            if identity != row.identity:
                apply_batch(session, row, batches.Batch(launch, identity=identity), ACTOR)
    with suppress(Invalid):
        outcome = batches.parse_outcome(_read(files, OUTCOME))
        return outcome if outcome is not None and outcome.attempt == launch else None
    return None


def forget_lost_lines(database: Database, run_id: str, folder: Path, launch: int, lease_token: int) -> None:
    """Lower the line offsets to what the files hold, before `launch` writes to them.

    A host that lost its page cache, or a restored back-up, leaves fewer lines than were received. The next launch
    continues the file there, so its lines would be skipped as already received. Rows of lost lines stay: an attempt
    that repeats their steps replaces them. Raises StateChanged as `drain` does.
    """
    run = _Leased(database, run_id, launch, lease_token)
    files = RunFiles(folder.parent, folder.name)
    held = {kind: _num_lines(files, name) for kind, name in FILES.items()}
    with run.locked() as (session, row):
        for kind, name in FILES.items():
            received = row.offsets.get(kind, 0)
            if held[kind] < received:
                row.offsets = {**row.offsets, kind: held[kind]}
                message = f"{name} holds {held[kind]} lines of the {received} that were received"
                events.record(session, row.number, ACTOR, "lines_lost", message)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leased:
    """A run that this scheduler holds; every transaction verifies the lease."""

    database: Database
    run_id: str
    launch: int
    lease_token: int

    @contextmanager
    def locked(self) -> Iterator[tuple[Session, Run]]:
        """A transaction that holds the run's row."""
        with self.database.writing() as session:
            run = service.lock(session, self.run_id)
            if run is None or run.lease_token != self.lease_token or run.launch != self.launch:
                lease = f"lease {self.lease_token}, launch {self.launch}"
                raise StateChanged(f"run {self.run_id} is no longer under {lease}")
            yield session, run


def _drain_file(run: _Leased, kind: batches.Kind, name: str, file: BinaryIO) -> None:
    with run.locked() as (_, row):
        begin = row.offsets.get(kind, 0)
    for lines in _parts(_rows(kind, name, file, begin)):
        problems = [problem for _, problem, _ in lines if problem is not None]
        batch = batches.Batch(run.launch, offsets={kind: begin}, rows={kind: [row for row, _, _ in lines]})
        with run.locked() as (session, row):  # lines received since are ignored
            apply_batch(session, row, batch, ACTOR)
            if problems:
                more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
                events.record(session, row.number, ACTOR, "lines_left_out", f"{problems[0]}{more}")
        begin += len(lines)


def _parts(lines: Iterable[_Line]) -> Iterator[list[_Line]]:
    """The lines that are applied in one transaction."""
    part: list[_Line] = []
    size = 0
    for line in lines:
        part.append(line)
        size += line[2]
        if len(part) >= _MOST_ROWS or size >= _MOST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _rows(kind: batches.Kind, name: str, file: BinaryIO, begin: int) -> Iterator[_Line]:
    """The rows of whole lines from line `begin` on.

    Invalid lines at the end are not counted: a crash can leave a partial line, which the next launch truncates.
    """
    waiting: list[_Line] = []
    for number, line in enumerate(_lines(file)):
        if number < begin:
            continue
        place = f"{name}, line {number + 1}"
        if line is None:
            waiting.append((None, f"{place} is longer than {_LONGEST_LINE} bytes", 0))
            continue
        try:
            content = batches.read_json(line, place)
        except Invalid as error:
            waiting.append((None, error.detail, len(line)))
            continue
        yield from waiting
        waiting.clear()
        try:
            yield batches.parse_row(kind, content, place), None, len(line)
        except Invalid as error:
            yield None, error.detail, len(line)


def _num_lines(files: RunFiles, name: str) -> int:
    """Number of lines up to the last one that is an object; a launch truncates what follows it."""
    count = 0
    with suppress(FileNotFoundError), files.open(name) as file:
        for number, line in enumerate(_lines(file), start=1):
            if line is None or (line.startswith(b"{") and line.endswith(b"}")):
                count = number
    return count


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Complete lines without their newline; None for a line over the limit."""
    too_long = False
    reader = io.BufferedReader(file, 1 << 18)  # type: ignore[type-var]
    while piece := reader.readline(_LONGEST_LINE + 1):
        if not piece.endswith(b"\n"):
            too_long = True
            continue
        yield None if too_long else piece[:-1]
        too_long = False


def _read(files: RunFiles, name: str) -> Any:
    """A JSON file of the run; None when it is missing or invalid."""
    try:
        return batches.read_json(files.read(name, most_bytes=_LONGEST_LINE), name)
    except (OSError, ValueError, Invalid):
        return None
