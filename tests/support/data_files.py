"""Data files of problems, by the suffix of their path."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    """Write rows as parquet, CSV (with the columns of the first) or JSON lines; a text is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, [*dict(rows[0])])
            writer.writeheader()
            writer.writerows(dict(row) for row in rows)
    else:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
