"""Published results as data: the tables of the GXPO paper. Free of torch.

Scores are in percent, as printed; benchmarks have the names of `evaluation.benchmarks`. `notes` explains what the
printed cells do not state. The results are not directly comparable to ours, because the paper uses its own grader,
templates and versions of the problem sets.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pydantic import BaseModel, Field


class PublishedTable(BaseModel):
    """A table of the paper."""

    number: int
    name: str = Field(examples=["sampled_pass@1"])
    model: str | None = Field(description="Model of all rows; null where each row names its own.")
    rows: list[dict[str, Any]] = Field(description="As printed; scores in percent.")


@dataclass(frozen=True, slots=True)
class PublishedScores:
    """Sampled pass@1 of one trained policy, in percent by benchmark, with `average`."""

    model: str
    method: str
    k: int | None
    backward_passes: int
    scores: dict[str, float]

    @property
    def label(self) -> str:
        """GRPO, SFPO K=3."""
        return self.method.upper() + ("" if self.k is None else f" K={self.k}")


class PublishedPaper(BaseModel):
    """The paper's results."""

    source: str
    units: str
    notes: list[str] = Field(description="Remarks that do not follow from the tables.")
    tables: list[PublishedTable]

    def table(self, name: str) -> PublishedTable:
        """A table by name. Raises KeyError listing the known names."""
        by_name = {table.name: table for table in self.tables}
        if name not in by_name:
            raise KeyError(f"no published table {name!r}; choose one of {', '.join(by_name)}")
        return by_name[name]

    def sampled_scores(self, model: str | None = None) -> tuple[PublishedScores, ...]:
        """Table 1, of one base model by its published name or of all models."""
        rows = (PublishedScores(**row) for row in self.table("sampled_pass@1").rows)
        return tuple(row for row in rows if model is None or row.model == model)


@functools.cache
def gxpo_paper() -> PublishedPaper:
    """The tables of arXiv 2605.06755."""
    file = resources.files("gxpo_trainer.compare") / "gxpo_paper.json"
    return PublishedPaper.model_validate_json(file.read_text(encoding="utf-8"))


def published_model(path: str) -> str | None:
    """The paper's base model named in a folder or hub name; None if there is none or more than one.

    `Qwen/Qwen2.5-1.5B-Instruct` and `runs/qwen2.5-1.5b-gxpo` are Qwen2.5-1.5B.
    """
    models = dict.fromkeys(row.model for row in gxpo_paper().sampled_scores())
    named = [m for m in models if re.search(rf"(?<![0-9a-z.]){re.escape(m)}(?![0-9a-z.])", path, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None
