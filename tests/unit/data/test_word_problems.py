"""The embedded task: golds recomputed from the text alone, sides disjoint, lists reproducible."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gxpo_trainer.data.word_problems import (
    DIFFICULTIES,
    MAX_NUMBER,
    MAX_NUMBER_LONG,
    SHORT,
    SPLITS,
    Difficulty,
    generate,
)
from gxpo_trainer.types import Prompt

# What each kind of problem asks for, written from its English text: the numbers in reading order → the result.
READINGS: dict[str, Callable[..., float]] = {
    "gain": lambda a, b: a + b,
    "loss": lambda a, b: a - b,
    "bags": lambda a, b: a * b,
    "share": lambda a, b: a / b,
    "gain_loss": lambda a, b, c: a + b - c,
    "stock_and_bags": lambda a, b, c: a + b * c,
    "bags_loss": lambda a, b, c: a * b - c,
    "share_and_stock": lambda a, b, c: a / b + c,
    "join_and_box": lambda a, b, c: (a + b) / c,
    "more_together": lambda a, b: 2 * a + b,
    "two_kinds": lambda a, b, c, d: a * b + c * d,
    "stock_bags_loss": lambda a, b, c, d: a + b * c - d,
    "bags_loss_share": lambda a, b, c, d: (a * b - c) / d,
    "more_together_share": lambda a, b, c: (2 * a + b) / c,
    "savings": lambda a, b, c, d: a * b - c + d,
    "bags_and_trades": lambda a, b, c, d, e: a + b * c + d - e,
    "more_together_trades": lambda a, b, c, d: a + (a + b) - c + d,
    "bags_loss_share_stock": lambda a, b, c, d, e: (a * b - c) / d + e,
    "two_kinds_trades": lambda a, b, c, d, e, f: a * b + c * d - e + f,
    "savings_and_bags": lambda a, b, c, d, e, f: a * b - c + d + e * f,
}
STEPS = {"easy": {1}, "medium": {2}, "hard": {3}, "long": {4, 5}}


@pytest.fixture(scope="module")
def problems() -> list[Prompt]:
    return [
        *(generate("train", 1500, 0) + generate("heldout", 600, 0)),
        *(generate("train", 300, 0, ("long",)) + generate("heldout", 200, 0, ("long",))),
    ]


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_gold_is_what_the_english_text_asks_for(problems: list[Prompt]) -> None:
    for problem in problems:
        reading = READINGS[problem.extra["family"]]
        assert reading(*numbers_in(problem.text)) == int(problem.gold), problem
        # English, and whole positive numbers within the bound.
        values = numbers_in(problem.text) + numbers_in(problem.completion or "")
        assert min(values) >= 2
        assert max(values) <= (MAX_NUMBER_LONG if problem.extra["difficulty"] == "long" else MAX_NUMBER)
        assert re.fullmatch(r"[A-Za-z0-9 ,.]+\?", problem.text)
    for split in SPLITS:
        assert {p.extra["family"] for p in generate(split, 800, 3, DIFFICULTIES)} == set(READINGS)


def test_worked_steps_are_true_use_known_numbers_and_end_in_the_boxed_gold(problems: list[Prompt]) -> None:
    for problem in problems:
        body, boxed = re.fullmatch(r"(.+), so \\boxed\{(\d+)\}", problem.completion or "").groups()  # type: ignore[union-attr]
        known = set(numbers_in(problem.text))
        lines = body.split(", ")
        for line in lines:
            left, operator, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()  # type: ignore[union-attr]
            x, y, z = int(left), int(right), int(result)
            assert {x, y} <= known, problem
            assert z == {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[operator], problem
            known.add(z)
        assert boxed == problem.gold == str(z)
        assert len(lines) in STEPS[problem.extra["difficulty"]]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_sides_share_no_text_and_no_calculation_for_any_seeds(train_seed: int, heldout_seed: int) -> None:
    train, heldout = generate("train", 200, train_seed), generate("heldout", 100, heldout_seed)
    for key in (lambda p: p.text, lambda p: p.id, lambda p: p.extra["calculation"]):
        assert not {key(p) for p in train} & {key(p) for p in heldout}


def test_lists_are_the_same_on_every_machine_and_shorter_ones_are_prefixes() -> None:
    assert generate("train", 120, 7) == generate("train", 300, 7)[:120]
    texts = "\n".join(f"{p.text}|{p.completion}" for p in generate("heldout", 50, 0))
    assert (
        hashlib.sha256(texts.encode()).hexdigest() == "8f4c7e5373f1a44cba15b0f31da123d001747a9ba26c5653d437098b104e04ec"
    )


@pytest.mark.parametrize("levels", [("easy",), ("long",), ("easy", "hard"), SHORT, DIFFICULTIES])
def test_levels_come_in_equal_shares_and_no_other_level_occurs(levels: tuple[Difficulty, ...]) -> None:
    counts = Counter(p.extra["difficulty"] for p in generate("heldout", 30 * len(levels), 2, levels))
    assert counts == dict.fromkeys(levels, 30)
