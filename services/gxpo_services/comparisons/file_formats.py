"""Streaming CSV, Parquet and JSON Lines writers.

csv      header line; NaN, Infinity, -Infinity; a missing value is an empty cell; ' before a text that a spreadsheet
         would take for a formula
parquet  typed columns; NaN and the infinities are floats; a missing value is null
jsonl    one object per line; NaN and the infinities are strings; a missing value is null
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from gxpo_client.spreadsheets import literal
from gxpo_trainer.jsonl import plain

Format = Literal["csv", "parquet", "jsonl"]
Kind = Literal["text", "whole", "number"]
Columns = Mapping[str, Kind]
"""Column → type of its values; every value may be None."""
Rows = Iterable[Sequence[tuple[Any, ...]]]
"""Chunks of rows, values in column order."""

MEDIA_TYPES: dict[Format, str] = {
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/x-ndjson",
}
_ROW_GROUP = 100_000


def columns(**names: str) -> dict[str, Kind]:
    """Columns from their names by type: `text="run name"`."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    return {name: kind for given, words in names.items() for kind in kinds if kind == given for name in words.split()}


def write_rows(form: Format, columns: Columns, rows: Rows) -> Iterator[bytes]:
    """The file including its header, in the chunks of `rows`."""
    return {"csv": _csv, "parquet": _parquet, "jsonl": _jsonl}[form](columns, rows)


def json_lines(objects: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[bytes]:
    """JSON Lines of objects with arbitrary members."""
    for piece in objects:
        if piece:
            lines = (json.dumps(plain(one), ensure_ascii=False, allow_nan=False) for one in piece)
            yield ("\n".join(lines) + "\n").encode()


def _csv(columns: Columns, rows: Rows) -> Iterator[bytes]:
    def lines(piece: Iterable[Iterable[Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([_word(value) for value in row] for row in piece)
        return text.getvalue().encode()

    yield lines([list(columns)])
    for piece in rows:
        yield lines(piece)


def _word(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return plain(value)
    return literal(value)


def _jsonl(columns: Columns, rows: Rows) -> Iterator[bytes]:
    return json_lines([dict(zip(columns, row, strict=True)) for row in piece] for piece in rows)


def _parquet(columns: Columns, rows: Rows) -> Iterator[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    types = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    sink = io.BytesIO()

    def taken() -> bytes:
        data = sink.getvalue()
        sink.seek(0)
        sink.truncate()
        return data

    # PythonFile tracks its own position, so the sink may be emptied while the file grows.
    with parquet.ParquetWriter(pa.PythonFile(sink, mode="w"), schema) as writer:
        waiting: list[tuple[Any, ...]] = []
        for piece in rows:
            waiting += piece
            if len(waiting) >= _ROW_GROUP:
                writer.write_table(_table(schema, waiting))
                waiting = []
                yield taken()
        if waiting:
            writer.write_table(_table(schema, waiting))
    yield taken()


def _table(schema: Any, rows: Sequence[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    arrays = [
        pa.array(values, type=field.type, from_pandas=False)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
