"""Tables in the terminal: comparisons of runs, and the scores of `gxpo eval`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gxpo_trainer.compare.text_tables import Table as TextTable


def show(table: TextTable) -> None:
    """Print a table."""
    grid = Table(title=Text(table.title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.header):
        grid.add_column(Text(name), justify="left" if number == 0 else "right")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    # Without a terminal rich assumes 80 columns, which would wrap the table.
    Console(width=None if sys.stdout.isatty() else 140).print(grid)


def show_scores(records: Sequence[Mapping[str, Any]], samples: int) -> None:
    """One row per benchmark: pass@1, pass@n and maj@n with their intervals, length, truncation, and failures if any."""
    names = dict.fromkeys(["pass@1", f"pass@{samples}", f"maj@{samples}"])
    failed = ["failed"] if any(record["scores"]["failed_fraction"] for record in records) else []
    shares = ["truncated", *failed]
    rows = []
    for record in records:
        scores = record["scores"]
        cells = (f"{scores[n]:.1%} [{scores[f'{n}/ci_low']:.1%}, {scores[f'{n}/ci_high']:.1%}]" for n in names)
        ends = (f"{scores['length_mean']:.0f}", *(f"{scores[f'{name}_fraction']:.1%}" for name in shares))
        rows.append((record["benchmark"], str(record["num_problems"]), *cells, *ends))
    header = ("benchmark", "problems", *names, "mean length", *shares)
    show(TextTable(f"{samples} samples per problem, 95% intervals", header, tuple(rows)))
