"""Writes the measured table of docs/tests.md: `GXPO_TEST_TIMES=FILE make test-all`, then
`python -m benchmarks.test_times FILE`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "tests.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NUM_SLOWEST = 25


def place(test: str) -> str:
    """The folder of unit and service tests, the file of tests with engines."""
    file = Path(test.partition("::")[0])
    return str(file if file.parent == Path("tests/integration") else file.parent)


def tables(tests: list[dict[str, Any]]) -> str:
    totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"short": [0, 0], "long": [0, 0]})
    for record in tests:
        for key in (place(record["test"]), "**all**"):
            totals[key][record["tier"]][0] += 1
            totals[key][record["tier"]][1] += record["cpu_s"]
    lines = [
        "| where | `make test`: tests | CPU s | only `make test-all`: tests | CPU s |",
        "|---|---:|---:|---:|---:|",
    ]
    for key, tiers in sorted(totals.items(), key=lambda item: -item[1]["short"][1]):
        cells = [f"{value:.0f}" for tier in ("short", "long") for value in tiers[tier]]
        lines.append(f"| {key if key == '**all**' else f'`{key}`'} | {' | '.join(cells)} |")
    lines += ["", f"The {NUM_SLOWEST} tests that take most, with what they are the first to start:", ""]
    lines += ["| test | tier | set-up s | call s | CPU s |", "|---|---|---:|---:|---:|"]
    for record in sorted(tests, key=lambda record: -record["cpu_s"])[:NUM_SLOWEST]:
        wall = record["wall_s"]
        name = record["test"].removeprefix("tests/")
        seconds = f"{wall.get('setup', 0):.1f} | {wall.get('call', 0):.1f} | {record['cpu_s']:.1f}"
        lines.append(f"| `{name}` | {record['tier']} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    page = PAGE.read_text(encoding="utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables(records)}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
