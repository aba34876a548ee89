"""The metrics that a run can write: their one table, metrics.toml, and its page docs/metrics.md.

Tests hold every name in the trainer's code and in the rows of real runs against it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that a reader looks up together.

    note: Markdown below the title, may be empty. metrics: names that share a meaning → the meaning in Markdown.
    """

    title: str
    metrics: dict[tuple[str, ...], str]
    note: str = ""


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
SECTIONS = tuple(
    Section(**body | {"metrics": {tuple(names.split(", ")): meaning for names, meaning in body["metrics"].items()}})
    for body in _TABLE["section"]
)


def undescribed(names: Iterable[str]) -> set[str]:
    """Those of `names` that no row of the table covers."""
    described = [name for section in SECTIONS for row in section.metrics for name in row]
    patterns = [re.sub(r"<\w+>", "[^/]+", re.escape(name)).replace("…", ".+") for name in described]
    known = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return {bare for name in names if not known.fullmatch(bare := re.sub(r"/ci_(low|high)$", "", name))}


INTRODUCTION = """# Metrics

<!-- Written by `make docs` from docs_build/metrics.toml; edit the descriptions there. -->

For readers of curves: every metric that a run can report, by its full name. The dashboard, the API, exports and
`metrics.jsonl` use the same names.

A row of `metrics.jsonl` is `{"attempt", "step", "time", "metrics": {name: value}}`. A step has one or more: its
evaluation and its checkpoint add rows of their own, and those of equal (attempt, step) belong together. A value that
does not exist at a step is left out, never 0. NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
`gxpo_trainer.reporting.reading.read_metrics` gives one history: from the first step that a later attempt
reported on, it replaces the earlier ones. With `learner.mini_batches` > 1, metrics of the update (`update/norm`,
`grad/`, `gxpo/`, `policy/`) are means over the mini-batches; the gate judges the mean of their values once a training
step.
"""


def render_page() -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + "".join(_section(section) for section in SECTIONS)


def _section(section: Section) -> str:
    rows = [(", ".join(f"`{name}`" for name in names), meaning) for names, meaning in section.metrics.items()]
    lines = ["| name | meaning |", "|---|---|", *(f"| {_cell(names)} | {_cell(meaning)} |" for names, meaning in rows)]
    note = f"{section.note}\n\n" if section.note else ""
    return f"\n## {section.title}\n\n{note}" + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
