"""Generated problems that ask for a Python function, with tests for `gxpo sandbox`. Free of torch.

    python -m gxpo_trainer.data.code_problems FILE.jsonl [--num 200] [--split train] [--seed 0]

A problem asks in one sentence for a function f of a number, a list or a text, which one expression calculates. Its row
has the text, a solution as `completion`, and tests whose inputs the text does not name. As in data/word_problems.py a
hash of the expression, independent of the seed, assigns each problem to a split; no held-out function is in training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gxpo_trainer.data.word_problems import SPLITS, Split, split_of

NUM_TESTS = 4
LETTERS = "abcdeorst"


_FAMILIES = (
    ("number", "x times {a} plus {b}", "x * {a} + {b}"),
    ("number", "x times {a} minus {b}", "x * {a} - {b}"),
    ("number", "the sum of x and {a}, times {b}", "(x + {a}) * {b}"),
    ("number", "x minus {a}, times {b}", "(x - {a}) * {b}"),
    ("number", "the larger of x and {a}, plus {b}", "max(x, {a}) + {b}"),
    ("number", "the smaller of x and {a}, times {b}", "min(x, {a}) * {b}"),
    ("number", "the sum of x and {b}, modulo {a}", "(x + {b}) % {a}"),
    ("list", "the sum of the list x, plus {a}", "sum(x) + {a}"),
    ("list", "the largest number of the list x, times {a}", "max(x) * {a}"),
    ("list", "the list x with each number times {a} plus {b}", "[n * {a} + {b} for n in x]"),
    ("list", "the numbers of the list x above {a}", "[n for n in x if n > {a}]"),
    ("list", "how many numbers of the list x are below {a}, times {b}", "sum(n < {a} for n in x) * {b}"),
    ("list", "the numbers of the list x in ascending order, each plus {a}", "[n + {a} for n in sorted(x)]"),
    ("text", "the text x with each {c} replaced by {d}", 'x.replace("{c}", "{d}")'),
    ("text", "how often {c} occurs in the text x, times {a}", 'x.count("{c}") * {a}'),
    ("text", "the text x backwards, then {c} and {d}", 'x[::-1] + "{c}{d}"'),
)
"""Argument, words and expression of each kind, with the numbers {a} and {b} and the letters {c} and {d}."""


def generate(split: Split, num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Generate rows of distinct problems of one split: id, problem, completion and tests.

    Deterministic on every machine; a shorter list is a prefix of a longer one. Raises ValueError for more problems than
    exist.
    """
    rng = random.Random(f"gxpo code problems {split} {seed}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < num_problems and misses < 10_000:  # in a row; then none is left
        misses += 1
        argument, words, template = rng.choice(_FAMILIES)
        c, d = rng.sample(LETTERS, 2)
        values = {"a": rng.randint(2, 30), "b": rng.randint(2, 30), "c": c, "d": d}
        expression = template.format(**values)
        if split_of("code", expression) != split or expression in rows:
            continue
        misses = 0
        digest = hashlib.sha256(f"gxpo code problem {expression}".encode()).hexdigest()
        function = eval(f"lambda x: {expression}")  # noqa: S307 (an expression of this file)
        inputs = [_draw(rng, argument) for _ in range(NUM_TESTS)]
        rows[expression] = {
            "id": f"code-{digest[:16]}",
            "problem": f"Write a Python function f(x) that returns {words.format(**values)}.",
            "completion": f"def f(x):\n    return {expression}",
            "tests": [{"call": "f", "args": [x], "expected": function(x)} for x in inputs],
        }
    if len(rows) < num_problems:
        raise ValueError(f"num_problems is {num_problems}, but only {len(rows)} {split} problems were found; lower it")
    return list(rows.values())


def _draw(rng: random.Random, argument: str) -> int | list[int] | str:
    if argument == "number":
        return rng.randint(-40, 60)
    if argument == "list":
        return [rng.randint(-10, 40) for _ in range(rng.randint(3, 7))]
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(6, 14)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gxpo_trainer.data.code_problems", description=__doc__)
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help="file to write")
    parser.add_argument("--num", metavar="N", type=int, default=200, help="problems; default 200")
    parser.add_argument("--split", choices=SPLITS, default="train", help="default train")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    args = parser.parse_args(argv)
    rows = generate(args.split, args.num, args.seed)
    args.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
