"""Generated code problems: expected values recomputed from the text alone, splits disjoint, lists reproducible."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.reward_server import isolated

from gxpo_trainer.data.code_problems import NUM_TESTS, generate

# What each kind of problem asks for, written from its English text: the argument and the text's parts → the result.
READINGS: dict[str, Callable[..., Any]] = {
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
    ((kind, match),) = [(kind, match) for kind in READINGS if (match := re.fullmatch(kind, asked))]
    return kind, [int(part) if part.isdigit() else part for part in match.groups()]


def test_the_expected_values_follow_from_the_text() -> None:
    rows = generate("train", 1000, 0)
    kinds = set()
    for row in rows:
        kind, parts = read(row["problem"])
        kinds.add(kind)
        assert len(row["tests"]) == NUM_TESTS
        for test in row["tests"]:
            assert test["expected"] == READINGS[kind](*test["args"], *parts), row["problem"]
    assert kinds == READINGS.keys()


def test_lists_are_reproducible_and_shorter_ones_are_prefixes() -> None:
    rows = generate("train", 200, 0)
    assert generate("train", 50, 0) == rows[:50]
    assert len({row["problem"] for row in rows}) == len({row["id"] for row in rows}) == 200
    body = json.dumps(rows, sort_keys=True).encode()
    assert hashlib.sha256(body).hexdigest() == "b5b6042c4b3b7499f03d7146962576259767da48a5c88fe98b68d8240435747f"
    with pytest.raises(ValueError, match=r"num_problems is 20000, but only .* train problems were found; lower it"):
        generate("train", 20_000, 0)
    # No held-out function is a training one, whatever the seed.
    train = {row["completion"] for seed in range(3) for row in generate("train", 1000, seed)}
    heldout = {row["completion"] for seed in range(3) for row in generate("heldout", 400, seed)}
    assert len(train) > 2000
    assert not train & heldout


def test_solutions_pass_in_the_sandbox_and_the_argument_itself_does_not() -> None:
    sandbox = isolated()
    kinds = {read(row["problem"])[0]: row for row in generate("heldout", 100, 1)}
    assert len(kinds) == len(READINGS)
    for row in kinds.values():
        assert sandbox.grade({"response": row["completion"], "extra": row})["reward"] == 1.0
        assert sandbox.grade({"response": "def f(x):\n    return x", "extra": row})["reward"] < 1.0
