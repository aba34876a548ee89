"""Renders docs/metrics.md from the table of metrics."""

from __future__ import annotations

from gxpo_trainer.reporting.metric_table import SECTIONS, Section

INTRODUCTION = """# Metrics

<!-- Written by `make docs` from trainer/gxpo_trainer/reporting/metrics.toml; edit the descriptions there. -->

For readers of curves: every metric that a run can report, by its full name. The dashboard, the API, exports and
`metrics.jsonl` use the same names.

One row a step in `metrics.jsonl`, keyed by (attempt, step): `{"attempt", "step", "time", "metrics": {name: value}}`. A
value that does not exist at a step is left out, never 0. NaN and infinities are the strings "NaN", "Infinity",
"-Infinity". `gxpo_trainer.reporting.reading.read_metrics` gives one history: from the first step that a later attempt
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
