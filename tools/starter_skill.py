"""The starter policy of `arithmetic_skill`: it works every answer out and often miscalculates.

    python -m tools.starter_skill --out DIR [--seed 0]

continues the recipe of the starter policy from its weights, with careful answers to long problems alone, and stops
early: the policy writes down the right steps in the right order, and makes mistakes in carries and products. Dividing
its logits by `temperature` makes more of them random, so that most problems have a right answer among several. There
is no better way to answer that it could choose, so that reinforcement learning has to improve the calculation itself.

The result is shipped in `starter_skill_policy/`. No held-out problem is used. What the policy reaches:
`python -m benchmarks.skill_task --policy DIR`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gxpo_trainer.data.word_problems import Difficulty
from gxpo_trainer.learner.models import STARTER_FOLDER
from tools.starter import Recipe, main


@dataclass(frozen=True, slots=True)
class SkillRecipe(Recipe):
    """Settings of the warm-up: one phase of careful answers."""

    start: ClassVar[Path | None] = STARTER_FOLDER
    levels: ClassVar[tuple[Difficulty, ...]] = ("long",)
    max_new_tokens: ClassVar[int] = 80

    first_steps: int = 600
    first_rate: float = 0.01
    first_careful_share: float = 1.0
    last_steps: int = 0
    batch: int = 32
    temperature: float = 1.2
    threads: int = 1


if __name__ == "__main__":
    sys.exit(main(recipe=SkillRecipe, module="starter_skill"))
