"""The files of a run, read back as one history.

A run that recovers from a checkpoint goes on as a new attempt and repeats steps. The readers give one
history: from the first step that an attempt reported on, it replaces all earlier attempts, steps that it
has not reached again included. So there is no step twice, and none from a history that was abandoned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row, decode_number, read_lines

METRICS, SAMPLES, EVALUATIONS, EVENTS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "events.jsonl"
IDENTITY = "run.json"


def read_metrics(path: Path) -> list[Row]:
    """Rows in order of steps, one a step, of the history that counts; values are floats again.

    path: metrics.jsonl or the run's folder; a file that does not exist yet has no rows. Raises DataError
    (file and line) for a line that is no JSON object.
    """
    file = _locate(path, METRICS)
    rows: dict[tuple[int, int], Row] = {}
    for row in read_lines(file):
        row["metrics"] = {name: decode_number(value) for name, value in row["metrics"].items()}
        earlier = rows.get((row["attempt"], row["step"]))
        rows[row["attempt"], row["step"]] = row | {"metrics": earlier["metrics"] | row["metrics"]} if earlier else row
    return _one_history(list(rows.values()), _first_steps(rows.values()), key=lambda row: row["step"])


def read_evaluations(path: Path) -> list[Row]:
    """Evaluations in order of steps, one a step and benchmark, of the history that counts. See read_metrics."""
    file = _locate(path, EVALUATIONS)
    rows = list(read_lines(file))
    for row in rows:
        row["scores"] = {name: decode_number(value) for name, value in row["scores"].items()}
        for name in ("backward_passes_total", "training_s", "tokens_total"):
            if isinstance(row.get(name), str):
                row[name] = decode_number(row[name])
    return _one_history(rows, _siblings_first_steps(file), key=lambda row: (row["step"], row["benchmark"]))


def read_samples(path: Path) -> list[Row]:
    """Responses in order of steps, of the history that counts. See read_metrics."""
    file = _locate(path, SAMPLES)
    firsts = _siblings_first_steps(file)
    return _one_history(list(read_lines(file)), firsts, key=lambda row: (row["step"], row["group"], row["sample"]))


def read_events(path: Path) -> list[Row]:
    """All events of all attempts, in the order in which they were written."""
    return list(read_lines(_locate(path, EVENTS)))


def read_identity(out_dir: Path) -> Row:
    """run.json. Raises DataError when it is missing or damaged."""
    path = out_dir / IDENTITY
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; name the folder of a run") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}); restore it or name another run") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: is no JSON object; restore it or name another run")
    return found


def _locate(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _first_steps(rows: Iterable[Row]) -> dict[int, int]:
    """The first step that each attempt reported on."""
    firsts: dict[int, int] = {}
    for row in rows:
        firsts[row["attempt"]] = min(row["step"], firsts.get(row["attempt"], row["step"]))
    return firsts


def _siblings_first_steps(path: Path) -> dict[int, int]:
    return _first_steps(read_lines(path.with_name(METRICS)))


def _one_history(rows: list[Row], firsts: Mapping[int, int], key: Callable[[Row], Any]) -> list[Row]:
    """Rows that no later attempt replaces; of those with one key the latest attempt's, written last."""
    chosen: dict[Any, Row] = {}
    for row in sorted(rows, key=lambda row: int(row["attempt"])):
        replaced = any(attempt > row["attempt"] and row["step"] >= first for attempt, first in firsts.items())
        if not replaced:
            chosen[key(row)] = row
    return [chosen[found] for found in sorted(chosen)]
