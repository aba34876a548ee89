"""The embedded tasks: generated word problems, which need no download. Free of torch.

Problems are plain English with whole numbers and have a worked answer that ends in a boxed result. They need one
(easy), two (medium) or three steps (hard) with numbers up to 199, or four or five with numbers up to 399 (long), which
need carries. The first three levels make up the task `word_problems`, the last one the task `arithmetic_skill`.

Training and held-out problems are disjoint by construction: a hash of the calculation, independent of names, things
and seed, assigns each problem to a split. No held-out calculation occurs in training, not even in other words.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, get_args

from gxpo_trainer.types import Prompt

Difficulty = Literal["easy", "medium", "hard", "long"]
Split = Literal["train", "heldout"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)
SHORT: tuple[Difficulty, ...] = ("easy", "medium", "hard")
"""The levels of the task `word_problems`."""
SPLITS: tuple[Split, ...] = get_args(Split)

HELDOUT_SHARE = 5
"""One in this many calculations is held out."""
MAX_NUMBER = 199
"""Largest number in a problem or worked answer of at most three steps."""
MAX_NUMBER_LONG = 399
"""The same of a long one."""


@dataclass(frozen=True, slots=True)
class _Family:
    """A kind of problem. Steps use the text's numbers a to f and earlier results x, y, z, u."""

    name: str
    steps: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]
    text: str

    @property
    def difficulty(self) -> Difficulty:
        return DIFFICULTIES[min(len(self.steps), len(DIFFICULTIES)) - 1]


_FAMILIES = (
    _Family("gain", ("a+b",), {"a": (5, 60), "b": (3, 39)},
            "{name} has {a} {things}. {who} gets {b} more. How many does {name} have now?"),
    _Family("loss", ("a-b",), {"a": (12, 90), "b": (3, 60)},
            "{name} has {a} {things}. {who} gives away {b}. How many are left?"),
    _Family("bags", ("a*b",), {"a": (2, 9), "b": (2, 12)},
            "{name} buys {a} bags with {b} {things} in each bag. How many are there?"),
    _Family("share", ("a/b",), {"a": (6, 96), "b": (2, 9)},
            "{name} shares {a} {things} equally among {b} friends. How many does each friend get?"),
    _Family("gain_loss", ("a+b", "x-c"), {"a": (5, 60), "b": (3, 39), "c": (3, 40)},
            "{name} has {a} {things}, gets {b} more and gives away {c}. How many are left?"),
    _Family("stock_and_bags", ("b*c", "a+x"), {"a": (5, 40), "b": (2, 9), "c": (2, 9)},
            "{name} has {a} {things} and buys {b} bags of {c} {things}. How many does {name} have now?"),
    _Family("bags_loss", ("a*b", "x-c"), {"a": (2, 9), "b": (2, 12), "c": (3, 40)},
            "{name} buys {a} bags of {b} {things} and gives away {c}. How many are left?"),
    _Family("share_and_stock", ("a/b", "c+x"), {"a": (6, 81), "b": (2, 9), "c": (3, 40)},
            "{a} {things} are shared equally among {b} friends. {name}, one of them, has {c} already. "
            "How many does {name} have now?"),
    _Family("join_and_box", ("a+b", "x/c"), {"a": (3, 50), "b": (3, 40), "c": (2, 9)},
            "{name} puts {a} red and {b} blue {things} equally into {c} boxes. How many are in each box?"),
    _Family("more_together", ("a+b", "a+x"), {"a": (5, 40), "b": (3, 30)},
            "{name} has {a} {things}. {other} has {b} more than {name}. How many do they have together?"),
    _Family("two_kinds", ("a*b", "c*d", "x+y"), {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9)},
            "{name} buys {a} bags of {b} {things} and {c} boxes of {d} {things}. How many are there?"),
    _Family("stock_bags_loss", ("b*c", "a+x", "y-d"), {"a": (5, 40), "b": (2, 9), "c": (2, 9), "d": (3, 40)},
            "{name} has {a} {things}, buys {b} bags of {c} {things} and gives away {d}. How many are left?"),
    _Family("bags_loss_share", ("a*b", "x-c", "y/d"), {"a": (2, 9), "b": (2, 12), "c": (3, 40), "d": (2, 9)},
            "{name} buys {a} bags of {b} {things}, gives away {c} and puts the rest equally into {d} boxes. "
            "How many are in each box?"),
    _Family("more_together_share", ("a+b", "a+x", "y/c"), {"a": (5, 40), "b": (3, 30), "c": (2, 9)},
            "{name} has {a} {things}. {other} has {b} more than {name}. "
            "They share them all equally among {c} friends. How many does each friend get?"),
    _Family("savings", ("a*b", "x-c", "d+y"), {"a": (2, 9), "b": (2, 12), "c": (3, 40), "d": (3, 40)},
            "{name} finds {a} {things} a day for {b} days, gives away {c} and then gets {d} more. "
            "How many does {name} have now?"),
    _Family("bags_and_trades", ("b*c", "a+x", "y+d", "z-e"),
            {"a": (12, 99), "b": (3, 9), "c": (11, 25), "d": (12, 99), "e": (12, 99)},
            "{name} has {a} {things}, buys {b} bags of {c} {things}, gets {d} more and gives away {e}. "
            "How many are left?"),
    _Family("more_together_trades", ("a+b", "a+x", "y-c", "z+d"),
            {"a": (12, 99), "b": (12, 60), "c": (12, 99), "d": (12, 99)},
            "{name} has {a} {things}. {other} has {b} more than {name}. They give away {c} and get {d} more. "
            "How many do they have together?"),
    _Family("bags_loss_share_stock", ("a*b", "x-c", "y/d", "e+z"),
            {"a": (3, 9), "b": (11, 40), "c": (12, 99), "d": (2, 9), "e": (12, 99)},
            "{name} buys {a} bags of {b} {things}, gives away {c} and shares the rest equally among {d} friends. "
            "{other}, one of them, has {e} already. How many does {other} have now?"),
    _Family("two_kinds_trades", ("a*b", "c*d", "x+y", "z-e", "u+f"),
            {"a": (3, 9), "b": (11, 20), "c": (3, 9), "d": (11, 20), "e": (12, 99), "f": (12, 99)},
            "{name} buys {a} bags of {b} {things} and {c} boxes of {d} {things}, gives away {e} and gets {f} more. "
            "How many does {name} have now?"),
    _Family("savings_and_bags", ("a*b", "x-c", "y+d", "e*f", "z+u"),
            {"a": (11, 25), "b": (3, 9), "c": (12, 99), "d": (12, 99), "e": (3, 9), "f": (11, 20)},
            "{name} finds {a} {things} a day for {b} days, gives away {c}, gets {d} more and buys {e} bags of {f} "
            "{things}. How many does {name} have now?"),
)  # fmt: skip

_PEOPLE = (
    ("Anna", "She"), ("Ben", "He"), ("Carla", "She"), ("David", "He"), ("Emma", "She"),
    ("Felix", "He"), ("Grace", "She"), ("Henry", "He"), ("Iris", "She"), ("Jonas", "He"),
)  # fmt: skip
_THINGS = ("apples", "beads", "books", "cards", "coins", "cups", "eggs", "marbles", "pears", "pens", "shells", "stamps")


def generate(split: Split, num_problems: int, seed: int, difficulty: tuple[Difficulty, ...] = SHORT) -> list[Prompt]:
    """Generate `num_problems` distinct problems of one split, with equal shares of the levels, in random order.

    `completion` is the worked answer, e.g. `6*8=48, 48+15=63, so \\boxed{63}`; `extra` has `difficulty`, `family` and
    `calculation` (the steps, which determine the split).

    Deterministic on every machine; a shorter list is a prefix of a longer one. Raises ValueError for more problems than
    exist. difficulty: at least one level.
    """
    levels = [level for level in DIFFICULTIES if level in difficulty]
    families = {level: [family for family in _FAMILIES if family.difficulty == level] for level in levels}
    rng = random.Random(f"gxpo word problems {split} {seed} {' '.join(levels)}")
    problems: dict[str, Prompt] = {}
    order: list[Difficulty] = []
    while len(problems) < num_problems:
        order = order or rng.sample(levels, len(levels))
        problem = _draw_new(rng, families[order.pop()], split, problems)
        if problem is None:
            raise ValueError(f"num_problems is {num_problems}, but {split} has {len(problems)} problems; lower it")
        problems[problem.text] = problem
    return list(problems.values())


def guess(problem: Prompt, rng: random.Random, right_share: float = 0.1) -> str:
    """Only a box, with a number near the result, or in `right_share` of cases the result."""
    result = int(problem.gold)
    return f"\\boxed{{{result if rng.random() < right_share else near_miss(result, rng)}}}"


def near_miss(number: int, rng: random.Random) -> int:
    """Another number, at most 12 from this one."""
    return rng.choice([n for n in range(max(2, number - 12), min(MAX_NUMBER, number + 12) + 1) if n != number])


def split_of(kind: str, calculation: str) -> Split:
    """The split of a calculation such as `6*8;15+48`, for every seed. kind: of its problem, `word` or `code`."""
    digest = hashlib.sha256(f"gxpo {kind} problem {calculation}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_SHARE == 0 else "train"


def _draw_new(rng: random.Random, families: list[_Family], split: Split, seen: Container[str]) -> Prompt | None:
    """A new problem of this split, or None after many attempts.

    The family is drawn first and kept, so that families with few valid draws are not underrepresented.
    """
    for _ in range(20):
        family = rng.choice(families)
        for _ in range(5000):
            problem = _draw(rng, family, split)
            if problem is not None and problem.text not in seen:
                return problem
    return None


def _draw(rng: random.Random, family: _Family, split: Split) -> Prompt | None:
    """A problem with drawn numbers, people and things; None if the numbers are of the other split, or a result is not a
    whole number from 2 to the level's largest."""
    numbers = {letter: rng.randint(*bounds) for letter, bounds in family.ranges.items()}
    values = dict(numbers)
    lines: list[str] = []
    canonical: list[str] = []
    result = 0
    largest = MAX_NUMBER_LONG if family.difficulty == "long" else MAX_NUMBER
    for step, target in zip(family.steps, "xyzuv", strict=False):
        match = re.fullmatch(r"(\w)([-+*/])(\w)", step)
        assert match is not None
        left, operator, right = values[match[1]], match[2], values[match[3]]
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
        if not 2 <= result <= largest or (operator == "/" and left % right):
            return None
        values[target] = result
        lines.append(f"{left}{operator}{right}={result}")
        # 3+5 and 5+3 are one calculation, so both are in the same split.
        first, second = sorted((left, right)) if operator in "+*" else (left, right)
        canonical.append(f"{first}{operator}{second}")
    calculation = ";".join(canonical)
    if split_of("word", calculation) != split:
        return None
    (name, who), (other, _) = rng.sample(_PEOPLE, 2)
    text = family.text.format(name=name, who=who, other=other, things=rng.choice(_THINGS), **numbers)
    extra = {"difficulty": family.difficulty, "family": family.name, "calculation": calculation}
    identifier = f"word-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return Prompt(identifier, text, str(result), extra, completion=f"{', '.join(lines)}, so \\boxed{{{result}}}")
