"""CSV files that the dashboard writes."""

from __future__ import annotations

import csv
import io

import pandas as pd
import pytest

from gxpo_client.formats import literal
from gxpo_dashboard.charts.base import Chart
from gxpo_dashboard.charts.benchmarks import score_table
from gxpo_dashboard.view_models.tables import csv_file

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "-a\r=1"]


def rows(frame: pd.DataFrame) -> list[list[str]]:
    return list(csv.reader(io.StringIO(csv_file(frame).decode(), newline="")))


@pytest.mark.parametrize("name", FORMULAS)
def test_neither_a_cell_nor_a_header_of_a_table_is_a_formula(name: str) -> None:
    points = pd.DataFrame({"series": [name] * 2, "x": [0, 1], "y": [-0.5, float("nan")]})
    chart = Chart("key", "Title", {}, {"points": points}, "y over x", "summary", "note")
    assert rows(chart.table()) == [["X", f"'{name}"], ["0", "-0.5"], ["1", ""]]
    scores = {"benchmark": "math500", "series": name, "step": 3, "y": 0.5, "low": 0.25, "high": 0.75}
    table = rows(score_table(pd.DataFrame([scores])))
    assert table[1][table[0].index("Run")] == f"'{name}"


def test_everything_else_is_written_as_it_is() -> None:
    frame = pd.DataFrame({"run": ["a=b", "ü,", None], "step": [-1, 2, 3], "score": [-0.25, float("nan"), 1e-9]})
    assert csv_file(frame) == frame.to_csv(index=False, lineterminator="\r\n").encode()
    assert [literal(value) for value in (-1, -0.5, None, True, "a")] == [-1, -0.5, None, True, "a"]
