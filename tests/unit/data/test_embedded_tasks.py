"""The embedded tasks, word problems and code problems: golds and expected values recomputed from the text alone, sides
disjoint, lists reproducible."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.reward_server import isolated

from gxpo_trainer.data import code_problems
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
    digest = hashlib.sha256(texts.encode()).hexdigest()
    assert digest == "8f4c7e5373f1a44cba15b0f31da123d001747a9ba26c5653d437098b104e04ec"


@pytest.mark.parametrize("levels", [("easy",), ("long",), ("easy", "hard"), SHORT, DIFFICULTIES])
def test_levels_come_in_equal_shares_and_no_other_level_occurs(levels: tuple[Difficulty, ...]) -> None:
    counts = Counter(p.extra["difficulty"] for p in generate("heldout", 30 * len(levels), 2, levels))
    assert counts == dict.fromkeys(levels, 30)


# What each kind of code problem asks for, likewise: the argument and the text's parts → the result.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    r"x times (\d+) plus (\d+)": lambda x, a, b: a * x + b,
    r"x times (\d+) minus (\d+)": lambda x, a, b: -(b - a * x),
    r"the sum of x and (\d+), times (\d+)": lambda x, a, b: b * x + a * b,
    r"x minus (\d+), times (\d+)": lambda x, a, b: b * x - a * b,
    r"the larger of x and (\d+), plus (\d+)": lambda x, a, b: (x if x > a else a) + b,
    r"the smaller of x and (\d+), times (\d+)": lambda x, a, b: b * (x if x < a else a),
    r"the sum of x and (\d+), modulo (\d+)": lambda x, b, a: divmod(x + b, a)[1],
    r"the sum of the list x, plus (\d+)": lambda x, a: sum([*x, a]),
    r"the largest number of the list x, times (\d+)": lambda x, a: sorted(x)[-1] * a,
    r"the list x with each number times (\d+) plus (\d+)": lambda x, a, b: [b + a * n for n in x],
    r"the numbers of the list x above (\d+)": lambda x, a: list(filter(lambda n: not n <= a, x)),
    r"how many numbers of the list x are below (\d+), times (\d+)": lambda x, a, b: b * len([n for n in x if a > n]),
    r"the numbers of the list x in ascending order, each plus (\d+)": lambda x, a: sorted(a + n for n in x),
    r"the text x with each (\w) replaced by (\w)": lambda x, c, d: d.join(x.split(c)),
    r"how often (\w) occurs in the text x, times (\d+)": lambda x, c, a: a * len(re.findall(c, x)),
    r"the text x backwards, then (\w) and (\w)": lambda x, c, d: "".join(reversed(x)) + c + d,
}


def read(problem: str) -> tuple[str, list[Any]]:
    """The kind of a problem and the numbers and letters in its text."""
    asked = problem.removeprefix("Write a Python function f(x) that returns ").removesuffix(".")
    ((kind, match),) = [(kind, match) for kind in FUNCTIONS if (match := re.fullmatch(kind, asked))]
    return kind, [int(part) if part.isdigit() else part for part in match.groups()]


def test_the_expected_values_follow_from_the_text() -> None:
    rows = code_problems.generate("train", 1000, 0)
    kinds = set()
    for row in rows:
        kind, parts = read(row["problem"])
        kinds.add(kind)
        assert len(row["tests"]) == code_problems.NUM_TESTS
        for test in row["tests"]:
            assert test["expected"] == FUNCTIONS[kind](*test["args"], *parts), row["problem"]
    assert kinds == FUNCTIONS.keys()


def test_lists_of_code_are_reproducible_and_shorter_ones_are_prefixes() -> None:
    rows = code_problems.generate("train", 200, 0)
    assert code_problems.generate("train", 50, 0) == rows[:50]
    assert len({row["problem"] for row in rows}) == len({row["id"] for row in rows}) == 200
    body = json.dumps(rows, sort_keys=True).encode()
    assert hashlib.sha256(body).hexdigest() == "b5b6042c4b3b7499f03d7146962576259767da48a5c88fe98b68d8240435747f"
    with pytest.raises(ValueError, match=r"num_problems is 20000, but only .* train problems were found; lower it"):
        code_problems.generate("train", 20_000, 0)
    # No held-out function is a training one, whatever the seed.
    train = {row["completion"] for seed in range(3) for row in code_problems.generate("train", 1000, seed)}
    heldout = {row["completion"] for seed in range(3) for row in code_problems.generate("heldout", 400, seed)}
    assert len(train) > 2000
    assert not train & heldout


def test_solutions_pass_in_the_sandbox_and_the_argument_itself_does_not() -> None:
    sandbox = isolated()
    kinds = {read(row["problem"])[0]: row for row in code_problems.generate("heldout", 100, 1)}
    assert len(kinds) == len(FUNCTIONS)
    for row in kinds.values():
        assert sandbox.grade({"response": row["completion"], "extra": row})["reward"] == 1.0
        assert sandbox.grade({"response": "def f(x):\n    return x", "extra": row})["reward"] < 1.0
