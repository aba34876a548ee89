"""Ingest the lines that a trainer did not send from the run's folder, after its launch is over.

The trainer may still send the same lines; the line offsets ensure that each is applied once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy.orm import Session

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
        run.apply(batches.Batch(launch, None, identity=identity))
    with suppress(batches.BadRow):
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
    for kind, name in FILES.items():
        received = run.lines(kind)
        if received:
            try:
                with files.open(name) as file:
                    held = _num_lines(file)
            except FileNotFoundError:
                held = 0
            if held < received:
                run.lower(kind, held, f"{name} holds {held} lines of the {received} that were received")


@dataclasses.dataclass(frozen=True, slots=True)
class _Leased:
    """A run that this scheduler holds; every transaction verifies the lease."""

    database: Database
    run_id: str
    launch: int
    lease_token: int

    def lines(self, kind: batches.Kind) -> int:
        """Number of lines received of a file."""
        with self.database.writing() as session:
            return int(self._locked(session).offsets.get(kind, 0))

    def apply(self, batch: batches.Batch, left_out: str | None = None) -> None:
        """Apply a batch, with an event about skipped lines; lines received since are ignored."""
        with self.database.writing() as session:
            run = self._locked(session)
            if batch.identity is not None and batch.identity == run.identity:
                return  # already received
            apply_batch(session, run, batch, ACTOR)
            if left_out is not None:
                events.record(session, run.number, ACTOR, "lines_left_out", left_out)

    def lower(self, kind: batches.Kind, lines: int, message: str) -> None:
        """Set the number of lines received of a file to a lower one, with an event."""
        with self.database.writing() as session:
            run = self._locked(session)
            run.offsets = {**run.offsets, kind: lines}
            events.record(session, run.number, ACTOR, "lines_lost", message)

    def _locked(self, session: Session) -> Run:
        run = service.lock(session, self.run_id)
        if run is None or run.lease_token != self.lease_token or run.launch != self.launch:
            raise StateChanged(f"run {self.run_id} is no longer under lease {self.lease_token}, launch {self.launch}")
        return run


def _drain_file(run: _Leased, kind: batches.Kind, name: str, file: BinaryIO) -> None:
    begin = run.lines(kind)
    rows: list[Any] = []
    problems: list[str] = []
    size = 0

    def send() -> None:
        nonlocal begin, size
        skipped = None
        if problems:
            skipped = problems[0] if len(problems) == 1 else f"{problems[0]}; and {len(problems) - 1} more"
        content: dict[str, Any] = {kind: list(rows)}
        run.apply(batches.Batch(run.launch, None, offsets={kind: begin}, **content), skipped)
        begin += len(rows)
        size = 0
        rows.clear()
        problems.clear()

    for row, problem, length in _rows(kind, name, file, begin):
        rows.append(row)
        size += length
        if problem is not None:
            problems.append(problem)
        if len(rows) >= _MOST_ROWS or size >= _MOST_BYTES:
            send()
    if rows:
        send()


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
            content = batches.read_json(line)
        except batches.BadRow as error:
            waiting.append((None, f"{place} {error.message}", len(line)))
            continue
        yield from waiting
        waiting.clear()
        try:
            batches.check_texts(line, content, place)
            yield batches.parse_row(kind, content, place), None, len(line)
        except batches.BadRow as error:
            yield None, str(error), len(line)


def _num_lines(file: BinaryIO) -> int:
    """Number of lines up to the last one that is an object; a launch truncates what follows it."""
    count = 0
    for number, line in enumerate(_lines(file), start=1):
        if line is None or (line.startswith(b"{") and line.endswith(b"}")):
            count = number
    return count


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Complete lines without their newline; None for a line over the limit."""
    rest = b""
    too_long = False
    while piece := file.read(1 << 18):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield None if too_long or len(line) > _LONGEST_LINE else line
            too_long = False
        if len(rest) > _LONGEST_LINE:
            rest, too_long = b"", True


def _read(files: RunFiles, name: str) -> Any:
    """A JSON file of the run; None when it is missing or invalid."""
    try:
        data = files.read(name, most_bytes=_LONGEST_LINE)
        content = batches.read_json(data)
        if name == OUTCOME:
            batches.replace_odd_characters(content)
        batches.check_texts(data, content, name)
        return content
    except (OSError, ValueError):
        return None
