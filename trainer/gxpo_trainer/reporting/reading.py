"""Readers of a run's files, as rows and as the curves of a comparison. Free of torch.

A run that recovers from a checkpoint continues as a new attempt and repeats steps. The readers merge attempts into one
history: from its first reported step on, an attempt replaces all earlier ones, including steps that it has not reached
again. No step occurs twice, and none of an abandoned history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gxpo_trainer.compare.curves import RunCurves
from gxpo_trainer.compare.rows import GATE_ENDS, GATE_Z, STEP_TIMES, Series, run_curves
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row, decode_number, read_lines

METRICS, SAMPLES, EVALUATIONS, EVENTS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "events.jsonl"
TIMELINE = "timeline.jsonl"
IDENTITY, CONFIG = "run.json", "config.toml"


def lines_from(path: Path, begin: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines from a byte on, without newlines, each with the byte after it. A missing file has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(begin)
        while (line := file.readline()).endswith(b"\n"):
            begin += len(line)
            yield line[:-1], begin


def read_metrics(out_dir: Path) -> list[Row]:
    """Rows of the merged history in order of steps, one per step, with float values.

    A missing file has no rows. Raises DataError (file and line) for a line that is not a JSON object.
    """
    rows: dict[tuple[int, int], Row] = {}
    for row in read_lines(out_dir / METRICS):
        row["metrics"] = {name: decode_number(value) for name, value in row["metrics"].items()}
        earlier = rows.get((row["attempt"], row["step"]))
        rows[row["attempt"], row["step"]] = row | {"metrics": earlier["metrics"] | row["metrics"]} if earlier else row
    return _merged(rows.values(), rows.values(), key=lambda row: row["step"])


def read_evaluations(out_dir: Path) -> list[Row]:
    """Evaluations of the merged history in order of steps, one per step and benchmark. See `read_metrics`."""
    rows = list(read_lines(out_dir / EVALUATIONS))
    for row in rows:
        row["scores"] = {name: decode_number(value) for name, value in row["scores"].items()}
    return _merged(rows, read_lines(out_dir / METRICS), key=lambda row: (row["step"], row["benchmark"]))


def read_samples(out_dir: Path) -> list[Row]:
    """Responses of the merged history in order of steps. See `read_metrics`."""
    metrics = read_lines(out_dir / METRICS)
    return _merged(read_lines(out_dir / SAMPLES), metrics, key=lambda row: (row["step"], row["group"], row["sample"]))


def read_events(out_dir: Path) -> list[Row]:
    """All events of all attempts, in the order of writing."""
    return list(read_lines(out_dir / EVENTS))


def read_identity(out_dir: Path) -> Row:
    """run.json. Raises DataError when it is missing or damaged."""
    path = out_dir / IDENTITY
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(identity, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); give the output folder of a run") from error
    return identity


def _merged(rows: Iterable[Row], metrics: Iterable[Row], key: Callable[[Row], Any]) -> list[Row]:
    """Rows not replaced by a later attempt; of rows with equal keys the last one of the latest attempt.

    metrics: rows of metrics.jsonl, which state the first step of each attempt.
    """
    firsts: dict[int, int] = {}
    for row in metrics:
        firsts[row["attempt"]] = min(row["step"], firsts.get(row["attempt"], row["step"]))
    chosen: dict[Any, Row] = {}
    for row in sorted(rows, key=lambda row: int(row["attempt"])):
        replaced = any(attempt > row["attempt"] and row["step"] >= first for attempt, first in firsts.items())
        if not replaced:
            chosen[key(row)] = row
    return [row for _, row in sorted(chosen.items(), key=lambda item: item[0])]


def has_curve(out_dir: Path) -> bool:
    """Whether a run was evaluated: not if it ended before its first evaluation, or before that of its warm start."""
    warm_start = read_identity(out_dir)["config"].get("warm_start") or {"steps": 0}
    return any(row["step"] >= warm_start["steps"] for row in read_evaluations(out_dir))


def load_run(out_dir: Path, benchmark: str | None = None) -> RunCurves:
    """Curves of one run from metrics.jsonl, evaluations.jsonl and run.json.

    benchmark: a name; by default the macro average of all benchmarks, at the steps where all were evaluated. Raises
    DataError when the run has no such evaluation.
    """
    identity = read_identity(out_dir)
    series, chosen = _series(read_metrics(out_dir)), [benchmark] if benchmark else None
    try:
        return run_curves(identity, read_evaluations(out_dir), series, benchmarks=chosen)
    except DataError as error:
        raise DataError(f"{out_dir / EVALUATIONS}: {error}") from None


def _series(rows: Sequence[Row]) -> Series:
    """The metrics that curves need, as arrays, from rows in order of steps."""
    series = {}
    for name in (GATE_Z, *GATE_ENDS, *STEP_TIMES):
        pairs = [(row["step"], row["metrics"][name]) for row in rows if name in row["metrics"]]
        if pairs:
            steps, values = np.array(pairs, dtype=np.float64).T
            series[name] = (steps, values)
    return series
