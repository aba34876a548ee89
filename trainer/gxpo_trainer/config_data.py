"""Settings of the problems: what is trained on, how responses are scored, what is evaluated."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, field_validator

from gxpo_trainer.config_base import Fraction, Settings

OWN_REWARDS = ("correctness", "format")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


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
        description="Training problems that stand in a benchmark of this run: left out and counted, an error, or kept.",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are left out and counted.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")


class RewardConfig(Settings):
    """A list: one `[[verifier.rewards]]` a component; the reward is their weighted sum (docs/evaluation.md)."""

    name: str = Field("correctness", description="`correctness`, `format`, or a class as `package.module:Class`.")
    weight: float = Field(1.0, description="Factor of the component in the sum.")

    @field_validator("name")
    @classmethod
    def _known_or_a_class(cls, value: str) -> str:
        if value not in OWN_REWARDS and not _CLASS_PATH.fullmatch(value):
            raise ValueError(f"must be one of {', '.join(OWN_REWARDS)}, or a class as package.module:Class")
        return value

    @field_validator("weight")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value) or value == 0.0:
            raise ValueError("must be a finite number other than 0; take the component out to do without it")
        return value

    @property
    def label(self) -> str:
        """What its metric and its value in samples.jsonl are called: the name, or the class without its module."""
        return self.name.rpartition(":")[2]


class VerifierConfig(Settings):
    """Scoring of responses in killable processes."""

    workers: int = Field(2, ge=1, description="Worker processes.")
    deadline_s: float = Field(5.0, gt=0, description="Wall clock of one answer; past it its process is killed.")
    memory_mb: int = Field(2048, ge=256, description="Address-space limit of a worker.")
    rewards: tuple[RewardConfig, ...] = Field(
        (RewardConfig(),), description="Components of the reward; their weighted sum is the reward."
    )
    max_failed_fraction: Fraction = Field(
        0.2, description="Stop the run when more verdicts of a step are timeout or error."
    )

    @field_validator("rewards")
    @classmethod
    def _told_apart(cls, value: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        if not value:
            raise ValueError("is empty; name at least one reward, such as correctness")
        labels = [reward.label for reward in value]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two rewards are called {twice[0]}, so their metrics would be one; rename a class")
        return value

    @property
    def correctness_alone(self) -> bool:
        """Whether the verdict says it all: 1 for correct, 0 for wrong."""
        return self.rewards == (RewardConfig(),)


class EvaluationConfig(Settings):
    """Benchmarks during and after training."""

    benchmarks: tuple[str, ...] = Field(
        ("word_problems",),
        description="`word_problems`, `math500`, `amc23`, `gsm8k`, `minerva`, `olympiadbench`, `aime24`, "
        "or paths of .jsonl files.",
    )
    data_root: str | None = Field(
        None, description="Folder with local copies: `<name>.jsonl` or a folder `<name>` in hub layout; none: the hub."
    )
    template: str = Field(
        "auto", description="As data.template; `auto`: data.template, and boxed where that is auto too."
    )
    every_steps: int = Field(10, ge=0, description="0: only at the end.")
    samples_per_prompt: int = Field(4, ge=1, description="n, for pass@k up to n.")
    num_problems: int | None = Field(256, ge=1, description="First so many problems of each; none: all.")
    max_new_tokens: int | None = Field(None, ge=1, description="none: rollout.max_new_tokens.")
    at_start: bool = Field(True, description="Also before the first step.")
