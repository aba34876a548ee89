"""The word lists of `words.toml`: units, number words, and phrases around answers."""

from __future__ import annotations

import functools
import re
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any


@functools.cache
def load() -> dict[str, Any]:
    """The tables `units`, `prefixes`, `numbers` and `phrases`."""
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def phrases(name: str) -> str:
    """A regex alternation of one list of phrases, longest first."""
    return "|".join(re.escape(phrase) for phrase in sorted(load()["phrases"][name], key=len, reverse=True))


@functools.cache
def _numbers() -> dict[str, int]:
    tables: dict[str, Any] = load()["numbers"]
    tens = {word: 20 + 10 * i for i, word in enumerate(tables["tens"].split())}
    return {word: i for i, word in enumerate(tables["small"].split())} | tens | dict(tables["large"])


def number_from_words(text: str) -> Fraction | None:
    """`twenty-one` is 21, `three hundred and five` is 305, `two thirds` 2/3; None for anything else."""
    numbers, denominators = _numbers(), load()["numbers"]["denominators"]
    words = re.findall(r"[a-z]+", text.lower())
    if not words or words[0] not in numbers or re.search(r"[^A-Za-z\s-]", text):
        return None
    if len(words) == 2 and (denominator := denominators.get(words[1]) or denominators.get(words[1].rstrip("s"))):
        return Fraction(numbers[words[0]], denominator)
    total = group = 0
    for word in words:
        value = numbers.get(word)
        if value is None and word != "and":
            return None
        if value is not None and value >= 1000:
            total, group = total + max(group, 1) * value, 0
        elif value is not None:
            group = max(group, 1) * value if value == 100 else group + value
    return Fraction(total + group)
