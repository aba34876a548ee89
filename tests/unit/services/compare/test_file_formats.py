"""Exported files, byte by byte where the format is text."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from pyarrow import parquet

from gxpo_services.compare import export
from gxpo_services.compare.export import Columns, write_rows

COLUMNS: Columns = {"name": "text", "step": "whole", "value": "number"}


def row(*values: Any) -> dict[str, Any]:
    return dict(zip(COLUMNS, values, strict=True))


PIECES = [[row("a", 1, 0.5), row("b,c", 2, math.nan)], [], [row(None, None, None), row("ü", 2**40, -math.inf)]]


def test_csv_spells_non_finite_numbers_and_leaves_missing_cells_empty() -> None:
    pieces = list(write_rows("csv", COLUMNS, PIECES))
    assert pieces[0] == b"name,step,value\r\n"
    assert pieces[1] == b'a,1,0.5\r\n"b,c",2,NaN\r\n'
    assert pieces[3].decode() == ",,\r\nü,1099511627776,-Infinity\r\n"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_csv_is_a_formula(text: str) -> None:
    """A spreadsheet runs such a cell, and names are free text of other people. Numbers keep their sign."""
    _, line = write_rows("csv", COLUMNS, [[row(text, -1, -0.5)]])
    assert line.decode().startswith((f"'{text},-1,-0.5", f'"\'{text}",-1,-0.5'))
    (line,) = write_rows("jsonl", COLUMNS, [[row(text, -1, -0.5)]])
    assert json.loads(line) == row(text, -1, -0.5)


@pytest.mark.parametrize(("row_group", "sizes"), [(2, [2, 2]), (3, [4]), (9, [4])])
def test_parquet_writes_full_row_groups(row_group: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_ROW_GROUP", row_group)
    pieces = list(write_rows("parquet", COLUMNS, PIECES))
    whole = b"".join(pieces)
    file = parquet.ParquetFile(io.BytesIO(whole))
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert groups == sizes
    # A full row group leaves the memory at once, the rest with the footer.
    assert len(pieces) == 1 + (sum(sizes) // row_group if row_group < 9 else 0)
    rows = file.read().to_pylist()
    assert [row["name"] for row in rows] == ["a", "b,c", None, "ü"]
    assert [row["step"] for row in rows] == [1, 2, None, 2**40]
    assert math.isnan(rows[1]["value"])
    assert [rows[i]["value"] for i in (0, 2, 3)] == [0.5, None, -math.inf]
