"""The starter policy with a tool: the first one, which has learned to call the calculator sometimes and badly.

    python -m tools.starter_tools --out DIR [--seed 0]

continues the recipe of the starter policy from its weights, with two more tokens, `<calc>` and `</calc>`. Its warm-up
conversations follow the protocol of the environment `calculator`: a turn of the policy is a calculation such as
`<calc>12*7</calc>`, which the user answers with `84`, or the box with the result, which ends the episode. A policy
that answers *in its head* (only the box) is mostly wrong. One that calls the tool has a *fault* in many conversations:
a wrong calculation, one left out, or a result that it does not use. The rest are complete and right, so that
reinforcement learning can discover that the tool pays, and how to use it.

The result is shipped in `starter_tools_policy/`. No held-out problem is used.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gxpo_trainer.data.word_problems import near_miss
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.types import Prompt
from tools.starter import Recipe, main, warmup_answer

OPEN, CLOSE = "<calc>", "</calc>"
FAILED = "error"
_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")

Step = tuple[int, str, int]
"""Left operand, operator, right operand."""


@dataclass(frozen=True, slots=True)
class ToolsRecipe(Recipe):
    """Settings of the warm-up. Careful conversations are those that call the tool; a short warm-up suffices, because
    the starter policy can read the problems already."""

    tags: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    start: ClassVar[Path | None] = STARTER_FOLDER

    first_steps: int = 200
    first_rate: float = 0.01
    last_steps: int = 60
    last_careful_share: float = 0.4
    batch: int = 32
    threads: int = 1
    first_fault_share: float = 0.1
    """Share of conversations with a fault among those of the first phase that call the tool."""
    last_fault_share: float = 0.5
    """The same in the last phase."""

    def conversation(self, problem: Prompt, rng: random.Random, *, last_phase: bool) -> list[str]:
        if rng.random() >= self.careful_share(last_phase):
            return [warmup_answer(problem, rng, 0.0, self)]
        if rng.random() < (self.last_fault_share if last_phase else self.first_fault_share):
            return faulty_conversation(problem, rng)
        return tool_conversation(steps_of(problem))


def steps_of(problem: Prompt) -> list[Step]:
    """The calculations of the worked answer."""
    return [(int(left), operator, int(right)) for left, operator, right, _ in _STEP.findall(problem.completion or "")]


def calculate(step: Step) -> int | None:
    """The result, None if it is not a whole number: there the warm-up shows `error`, the environment a fraction."""
    left, operator, right = step
    if operator == "/":
        return left // right if right and left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def tool_conversation(steps: list[Step], result: int | None = None) -> list[str]:
    """One call a step, then the box with the last answer of the tool, or with `result`."""
    turns: list[str] = []
    for left, operator, right in steps:
        outcome = calculate((left, operator, right))
        turns += [f"{OPEN}{left}{operator}{right}{CLOSE}", FAILED if outcome is None else str(outcome)]
    return [*turns, f"\\boxed{{{turns[-1] if result is None else result}}}"]


def faulty_conversation(problem: Prompt, rng: random.Random) -> list[str]:
    """One of three faults, equally likely: a wrong calculation, a number near the result instead of it, or an
    intermediate result instead of it (a wrong calculation where the problem has one step only). What the tool said is
    used whatever it is, even a negative number or `error` in the box."""
    steps, result = steps_of(problem), int(problem.gold)
    fault = rng.choice(("calculation", "result", "calculation left out"))
    if fault == "result":
        return tool_conversation(steps, near_miss(result, rng))
    if fault == "calculation left out" and len(steps) > 1:
        return tool_conversation(steps[: rng.randrange(1, len(steps))])
    wrong = rng.randrange(len(steps))
    right_outcome = calculate(steps[wrong])
    steps[wrong] = _wrong_step(steps[wrong], rng)
    outcome = calculate(steps[wrong])
    if outcome is None:
        return tool_conversation(steps[: wrong + 1], near_miss(result, rng))
    later = [
        tuple(outcome if value == right_outcome else value for value in step)  # the policy uses what the tool said
        for step in steps[wrong + 1 :]
    ]
    return tool_conversation([*steps[: wrong + 1], *later])  # type: ignore[list-item]


def _wrong_step(step: Step, rng: random.Random) -> Step:
    """The step with another operator, or with a number near one of its operands."""
    left, operator, right = step
    change = rng.randrange(3)
    if change == 0:
        return left, rng.choice([other for other in "+-*/" if other != operator]), right
    return (near_miss(left, rng), operator, right) if change == 1 else (left, operator, near_miss(right, rng))


if __name__ == "__main__":
    sys.exit(main(recipe=ToolsRecipe, module="starter_tools"))
