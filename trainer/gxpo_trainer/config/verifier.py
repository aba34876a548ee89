"""Settings of scoring: the verifier and the components of the reward."""

from __future__ import annotations

import math
import re

from pydantic import Field, field_validator

from gxpo_trainer.config.base import Fraction, Settings

OWN_REWARDS = ("correctness", "format", "environment")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class RewardConfig(Settings):
    """A list: one `[[verifier.rewards]]` a component; the reward is their weighted sum (docs/evaluation.md)."""

    name: str = Field(
        "correctness",
        description="`correctness`, `format`, `environment` (what the environment gave), or a class as "
        "`package.module:Class`.",
    )
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
            raise ValueError("must be a finite number other than 0; remove the component to do without it")
        return value

    @property
    def label(self) -> str:
        """Name of its metric and of its value in samples.jsonl: the name, or the class without its module."""
        return self.name.rpartition(":")[2]


class VerifierConfig(Settings):
    """Scoring of responses in killable processes."""

    workers: int = Field(2, ge=1, description="Worker processes.")
    deadline_s: float = Field(5.0, gt=0, description="Time limit of one answer, after which its process is killed.")
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
        """Whether the reward follows from the verdict: 1 for correct, 0 for wrong."""
        return self.rewards == (RewardConfig(),)
