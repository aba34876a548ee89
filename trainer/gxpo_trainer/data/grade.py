"""Implementation of `gxpo grade`: reads rows of gold and prediction, writes verdicts in order. Free of torch."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TextIO

from gxpo_trainer.data.records import Record, read_records
from gxpo_trainer.errors import DataError
from gxpo_trainer.grading.pool import Pair, VerifierPool
from gxpo_trainer.types import EXTRA_KEY, VERDICTS, VerifyOptions

CHUNK = 4096
"""Answers that are graded before their verdicts are written."""


def grade_file(
    path_in: Path, out_stream: TextIO, workers: int | None = None, deadline_s: float = 5.0
) -> dict[str, int]:
    """Grade lines `{"gold": str, "prediction": str}`, perhaps with `"verify"` (VerifyOptions); count each verdict.

    `out_stream` gets one line `{"verdict", "extracted", "seconds", "detail"}` for each, in order. workers: processes;
    None: one per core. deadline_s: of one answer. Raises DataError, before grading, for an unusable file, and
    VerifierFailed when workers cannot be started.
    """
    pairs = [_pair(record) for record in read_records([path_in])]
    if not pairs:
        raise DataError(f"{path_in}: is empty; write rows with gold and prediction")
    counts: Counter[str] = Counter()
    with VerifierPool(workers if workers is not None else len(os.sched_getaffinity(0)), deadline_s) as pool:
        for start in range(0, len(pairs), CHUNK):
            for verdict in pool.submit(pairs[start : start + CHUNK]).result():
                # UTF-8 cannot encode lone surrogates, which become escapes.
                extracted = verdict.extracted and verdict.extracted.encode("utf-8", "backslashreplace").decode("utf-8")
                row = {"verdict": verdict.status, "extracted": extracted, "seconds": round(verdict.seconds, 6)}
                if verdict.detail:
                    row["detail"] = verdict.detail
                out_stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                counts[verdict.status] += 1
    return {status: counts[status] for status in VERDICTS}


def _pair(record: Record) -> Pair:
    row, given = record.fields, record.fields.get(EXTRA_KEY)
    for key in ("gold", "prediction"):
        if not isinstance(row.get(key), str):
            raise DataError(f"{record.location}: {key!r} is {row.get(key)!r}; it must be a string")
    try:
        options = VerifyOptions.from_dict({} if given is None else given)
    except ValueError as error:
        raise DataError(f"{record.location}: {EXTRA_KEY!r}: {error}") from None
    return row["gold"], row["prediction"], {"options": options.to_dict()}
