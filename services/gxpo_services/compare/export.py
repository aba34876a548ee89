"""`/export`: metrics, evaluations, runs and samples as streams of CSV or JSON Lines.

csv      header line; NaN, Infinity, -Infinity; a missing value is an empty cell; ' before a text that a spreadsheet
         would take for a formula; nested values are JSON text
jsonl    one object per line; NaN and the infinities are strings; a missing value is null

Each chunk is read in its own transaction, so a slow client does not hold a database connection."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from sqlalchemy.orm import Session
from zipstream import ZIP_DEFLATED, ZipStream

from gxpo_client.formats import literal
from gxpo_services.compare import loading
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.outputs import metrics, samples
from gxpo_trainer.compare.rows import decode_evaluation
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import plain

Format = Literal["csv", "jsonl"]
Row = dict[str, Any]

MEDIA_TYPES: dict[Format, str] = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}


def write_rows(form: Format, columns: Sequence[str], pages: Iterable[list[Row]]) -> Iterator[bytes]:
    """The file including its header, page by page. jsonl has every member of a row, csv those in `columns`."""
    if form == "csv":
        yield _csv_lines([{name: name for name in columns}], columns)
    for page in pages:
        if form == "csv":
            yield _csv_lines(page, columns)
        elif page:
            lines = (json.dumps(plain(row), ensure_ascii=False, allow_nan=False) for row in page)
            yield ("\n".join(lines) + "\n").encode()


def _csv_lines(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    for row in rows:
        cells = (row.get(name) for name in columns)
        texts = (json.dumps(c, ensure_ascii=False) if isinstance(c, bool | list | dict) else c for c in cells)
        csv.writer(text).writerow([plain(literal(cell)) for cell in texts])
    return text.getvalue().encode()


Part = Literal["metrics", "evaluations", "runs", "samples"]
_METRICS_AT_ONCE = 20
_SAMPLES_AT_ONCE = 500

METRIC_COLUMNS = ("run", "name", "attempt", "step", "metric", "value")
EVALUATION_COLUMNS = (
    *("run", "name", "attempt", "step", "benchmark", "metric", "value", "num_problems", "samples_per_prompt"),
    *("backward_passes_total", "training_s", "tokens_total"),
)
SAMPLE_COLUMNS = (
    *("run", "name", "attempt", "step", "group", "sample", "prompt_id", "prompt", "response", "extracted", "gold"),
    *("verdict", "reward", "length", "truncated", "turns", "end", "end_detail", "sampled_length"),
)
_RUN_FIELDS = (
    *("name", "state", "reason", "rule", "model", "seed", "step", "backward_passes", "tokens", "training_s", "score"),
    *("score_best", "score_step", "created_at", "started_at", "ended_at", "created_by", "config_sha256", "notes"),
)
RUN_COLUMNS = ("run", *_RUN_FIELDS, "group", "group_values", "tags", "config")


def export(
    database: Database, runs: Sequence[Run], form: Format, parts: Sequence[Part]
) -> tuple[str, str, Iterator[bytes]]:
    """Name, media type and content: one table as a file, several as a zip of files."""
    files = {
        f"{part}.{form}": write_rows(form, columns, pages(database, runs, form))
        for part, (columns, pages) in _TABLES.items()
        if part in parts
    }
    if len(files) == 1:
        ((name, pieces),) = files.items()
        return f"gxpo-{name}", MEDIA_TYPES[form], pieces
    archive = ZipStream(compress_type=ZIP_DEFLATED, compress_level=3)
    for name, pieces in files.items():
        archive.add(pieces, name)
    return "gxpo-export.zip", "application/zip", iter(archive)


def _metrics(database: Database, runs: Sequence[Run], _: Format) -> Iterator[list[Row]]:
    """Long form: one row per value of the effective history."""
    for run in runs:
        with database.reading() as session:
            names = metrics.names_of(session, run.number)
        for begin in range(0, len(names), _METRICS_AT_ONCE):
            with database.reading() as session:
                points = _points(session, run, names[begin : begin + _METRICS_AT_ONCE])
            yield points


def _points(session: Session, run: Run, names: Sequence[str]) -> list[Row]:
    """All values of the named metrics of a run, metric by metric in order of steps."""
    firsts = metrics.first_steps(session, [run.number])[run.number]
    rows = []
    for metric, (steps, values) in loading.series_of(session, [run.number], names)[run.number].items():
        # At each step the latest attempt started by then is effective.
        attempts = np.zeros(len(steps), dtype=np.int64)
        for attempt, first in sorted(firsts.items()):
            attempts[steps >= first] = attempt
        points = zip(attempts.tolist(), steps.astype(np.int64).tolist(), values.tolist(), strict=True)
        rows += [dict(zip(METRIC_COLUMNS, (run.id, run.name, a, s, metric, v), strict=True)) for a, s, v in points]
    return rows


def _evaluations(database: Database, runs: Sequence[Run], form: Format) -> Iterator[list[Row]]:
    """jsonl: the trainer's full records, including the scores of each problem; otherwise one row per score."""
    for run in runs:
        with database.reading() as session:
            evaluations = samples.evaluations_of(session, [run.number])[run.number]
        records = [{"run": run.id, "name": run.name, **record} for record in evaluations]
        yield records if form == "jsonl" else [row for record in records for row in _scores(record)]


def _scores(record: Row) -> Iterator[Row]:
    """One row per score; none for an invalid record."""
    try:
        evaluation = decode_evaluation(record)
    except DataError:
        return
    for metric, value in evaluation["scores"].items():
        yield evaluation | {"metric": metric, "value": value}


def _samples(database: Database, runs: Sequence[Run], _: Format) -> Iterator[list[Row]]:
    """One row per response of the effective history."""
    columns = {"group": "group_index", "sample": "sample_index"}
    for run in runs:
        after: int | None = 0
        while after is not None:
            with database.reading() as session:
                rows = samples.arrived_samples(session, run.number, after=after, limit=_SAMPLES_AT_ONCE)
                own = {"run": run.id, "name": run.name}
                page = [
                    {
                        name: own[name] if name in own else getattr(row, columns.get(name, name))
                        for name in SAMPLE_COLUMNS
                    }
                    for row in rows
                ]
                after = rows[-1].number if rows else None
            yield page


def _runs(_: Database, runs: Sequence[Run], _form: Format) -> Iterator[list[Row]]:
    """One row per run, with its config."""
    yield [
        {
            "run": run.id,
            **{name: getattr(run, name) for name in _RUN_FIELDS},
            "state": str(run.state),
            "group": run.group.id if run.group else None,
            "group_values": run.group_values,
            "tags": sorted(tag.tag for tag in run.tags),
            "config": run.config,
        }
        for run in runs
    ]


_TABLES: dict[Part, tuple[Sequence[str], Callable[[Database, Sequence[Run], Format], Iterator[list[Row]]]]] = {
    "metrics": (METRIC_COLUMNS, _metrics),
    "evaluations": (EVALUATION_COLUMNS, _evaluations),
    "runs": (RUN_COLUMNS, _runs),
    "samples": (SAMPLE_COLUMNS, _samples),
}
