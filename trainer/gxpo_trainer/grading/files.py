"""Implementation of `gxpo grade`: reads JSON lines of gold and prediction, writes verdicts in order."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gxpo_trainer.errors import DataError
from gxpo_trainer.grading.options import EXTRA_KEY, VerifyOptions
from gxpo_trainer.grading.pool import Pair, VerifierPool
from gxpo_trainer.types import VERDICTS, Verdict

CHUNK = 64
CHUNKS_AHEAD_PER_WORKER = 4


def grade_file(
    path_in: Path, out_stream: TextIO, workers: int | None = None, deadline_s: float = 5.0
) -> dict[str, int]:
    """Grade every line of a JSONL file; with a progress bar where standard error is a terminal.

    Args:
        path_in: lines `{"gold": str, "prediction": str}`, optionally with verification options
            `"verify": {"tolerance", "unit", "several"}`; other keys are ignored.
        out_stream: receives one line `{"verdict", "extracted", "seconds", "detail"}` per input line, in order.
        workers: number of processes; one per core when None.
        deadline_s: time limit per answer, seconds.

    Returns:
        The number of verdicts of each of the five kinds.

    Raises:
        DataError: the file is missing, empty or malformed (checked before grading; with the line number).
        VerifierFailed: workers cannot be started.
    """
    total = sum(1 for _ in read_pairs(path_in))
    if total == 0:
        raise DataError(f"{path_in}: is empty; write one JSON object with gold and prediction per line")
    counts: Counter[str] = Counter()
    num_workers = workers if workers is not None else len(os.sched_getaffinity(0))
    console = Console(file=sys.stderr)
    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        VerifierPool(num_workers, deadline_s) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("grading", total=total)
        for verdict in _verdicts(pool, read_pairs(path_in), CHUNKS_AHEAD_PER_WORKER * num_workers):
            # UTF-8 cannot encode lone surrogates, which become escapes.
            extracted = verdict.extracted and verdict.extracted.encode("utf-8", "backslashreplace").decode("utf-8")
            row = {"verdict": verdict.status, "extracted": extracted, "seconds": round(verdict.seconds, 6)}
            if verdict.detail:
                row["detail"] = verdict.detail
            out_stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            counts[verdict.status] += 1
            bar.advance(task)
    return {status: counts[status] for status in VERDICTS}


def _verdicts(pool: VerifierPool, pairs: Iterator[Pair], ahead: int) -> Iterator[Verdict]:
    """Verdicts in order, with a bounded number of chunks in flight."""
    pending: collections.deque[concurrent.futures.Future[list[Verdict]]] = collections.deque()
    while chunk := list(itertools.islice(pairs, CHUNK)):
        pending.append(pool.submit(chunk))
        if len(pending) >= ahead:
            yield from pending.popleft().result()
    while pending:
        yield from pending.popleft().result()


def read_pairs(path: Path) -> Iterator[Pair]:
    """(gold, prediction) of each line, with its options if any. Raises DataError with file and line."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield _pair(path, number, line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a JSONL file") from error


def _pair(path: Path, number: int, line: bytes) -> Pair:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: {type(row).__name__} instead of an object with gold and prediction")
    for key in ("gold", "prediction"):
        if not isinstance(row.get(key), str):
            raise DataError(f"{path}, line {number}: {key!r} is {row.get(key)!r}; it must be a string")
    if row.get(EXTRA_KEY) is None:
        return row["gold"], row["prediction"]
    try:
        options = VerifyOptions.from_dict(row[EXTRA_KEY])
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {EXTRA_KEY!r}: {error}") from None
    return row["gold"], row["prediction"], {"options": options.to_dict()}
