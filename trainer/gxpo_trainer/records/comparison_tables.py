"""Tables of a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gxpo_trainer.compare.evidence import weigh
from gxpo_trainer.compare.groups import Comparison
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.compare.text_tables import all_tables


def print_tables(
    groups: Sequence[SeedGroup],
    comparison: Comparison,
    console: Console | None = None,
    sampling_share: float | None = None,
) -> None:
    """Print the comparison's tables and its evidence statement."""
    console = console if console is not None else Console()
    for table in all_tables(groups, comparison, sampling_share):
        shown = RichTable(
            title=Text(table.title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for number, name in enumerate(table.header):
            shown.add_column(Text(name), justify="left" if number == 0 else "right")
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    console.print(Text(weigh(comparison).sentence))
