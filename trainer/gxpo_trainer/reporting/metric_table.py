"""The metrics that a run can write, from metrics.toml: the one table of their names and meanings.

docs/metrics.md is rendered from it (`make docs`), and tests hold every name in the trainer's code and in the rows of
real runs against it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that a reader looks up together.

    note: Markdown below the title, may be empty. metrics: names that share a meaning → the meaning in Markdown.
    """

    title: str
    metrics: dict[tuple[str, ...], str]
    note: str = ""


_TABLE = tomllib.loads((resources.files(__package__) / "metrics.toml").read_text(encoding="utf-8"))
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
