"""Settings of the training problems."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gxpo_trainer.config.base import Settings


class DataConfig(Settings):
    """Training problems."""

    source: str = Field(
        "word_problems",
        description="`word_problems` (the embedded task), a .jsonl file, a local folder in hub layout, or a hub name.",
    )
    split: str = Field("train", description="Split of a hub data set.")
    subset: str | None = Field(None, description="Configuration name of a hub data set.")
    prompt_field: str = Field("problem", description="Field that holds the problem.")
    answer_field: str = Field("answer", description="Field that holds the final answer.")
    template: str = Field(
        "auto",
        description="`plain`, `boxed`, a text with {problem}, or `auto`: plain for the embedded task, else boxed.",
    )
    levels: tuple[int, ...] | None = Field(None, description="Keep only these MATH levels, e.g. [3, 4, 5].")
    num_problems: int = Field(4096, ge=1, description="Embedded task only: number of generated problems.")
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = Field(
        ("easy", "medium", "hard"), min_length=1, description="Embedded task only: levels to draw from."
    )
    contamination: Literal["drop", "refuse", "ignore"] = Field(
        "drop",
        description="Training problems that occur in a benchmark of this run: excluded and counted, an error, or kept.",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are excluded and counted.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")
