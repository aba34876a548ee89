"""Tables in the terminal: comparisons of runs, and the scores of `gxpo eval` with earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gxpo_trainer.compare.intervals import mean_interval
from gxpo_trainer.compare.seeds import incomparable
from gxpo_trainer.compare.text_tables import Table as TextTable


def rendered(table: TextTable) -> Table:
    """A table of a comparison for the console."""
    grid = Table(title=Text(table.title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.header):
        grid.add_column(Text(name), justify="left" if number == 0 else "right")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return grid


Record = Mapping[str, Any]


def scores_table(records: Sequence[Record], samples: int) -> Table:
    """One row per benchmark: pass@1, pass@n and maj@n with their intervals, length, truncation."""
    names = dict.fromkeys(["pass@1", f"pass@{samples}", f"maj@{samples}"])
    rows = []
    for record in records:
        scores = record["scores"]
        cells = (f"{scores[n]:.1%} [{scores[f'{n}/ci_low']:.1%}, {scores[f'{n}/ci_high']:.1%}]" for n in names)
        ends = (f"{scores['length_mean']:.0f}", f"{scores['truncated_fraction']:.1%}")
        rows.append((record["benchmark"], str(record["num_problems"]), *cells, *ends))
    header = ("benchmark", "problems", *names, "mean length", "truncated")
    return rendered(TextTable(f"{samples} samples per problem, 95% intervals", header, tuple(rows)))


def difference_table(records: Sequence[Record], earlier: Sequence[Record]) -> Table:
    """Paired difference of pass@1 to the last earlier record of each benchmark, or why it is not comparable."""
    last = {record["benchmark"]: record for record in earlier}
    rows = []
    for record in records:
        before = last.get(record["benchmark"])
        then = "–" if before is None else f"{before['scores']['pass@1']:.1%}"
        change = "not in the earlier file" if before is None else _difference(record, before)
        rows.append((record["benchmark"], then, f"{record['scores']['pass@1']:.1%}", change))
    title = "pass@1 against the earlier evaluation, 95% intervals, paired by problem"
    return rendered(TextTable(title, ("benchmark", "earlier", "now", "difference"), tuple(rows)))


def _difference(record: Record, before: Record) -> str:
    reasons = incomparable(record, before)
    if reasons:
        return "not comparable: " + "; ".join(reasons)
    interval = mean_interval(np.subtract(record["per_problem"], before["per_problem"]))
    bounds = "" if interval.low is None else f" [{interval.low:+.1%}, {interval.high:+.1%}]"
    return f"{interval.mean:+.1%}{bounds}"
