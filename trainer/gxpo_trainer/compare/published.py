"""Published results as data: the tables of the GXPO paper. Free of torch.

Scores are in percent, as printed; benchmarks have the names of `evaluation.benchmarks`. `notes` explains what the
printed cells do not state. The results are not directly comparable to ours, because the paper uses its own grader,
templates and versions of the problem sets.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from pydantic import BaseModel, Field


class PublishedTable(BaseModel):
    """A table of the paper."""

    number: int
    name: str = Field(examples=["sampled_pass@1"])
    model: str | None = Field(description="Model of all rows; null where each row names its own.")
    rows: list[dict[str, Any]] = Field(description="As printed; scores in percent.")


class PublishedPaper(BaseModel):
    """The paper's results."""

    source: str
    units: str
    notes: list[str] = Field(description="Remarks that do not follow from the tables.")
    tables: list[PublishedTable]


@functools.cache
def gxpo_paper() -> PublishedPaper:
    """The tables of arXiv 2605.06755."""
    file = resources.files("gxpo_trainer.compare") / "gxpo_paper.json"
    return PublishedPaper.model_validate_json(file.read_text(encoding="utf-8"))
