"""The word lists of `words.toml`: units, number words, and phrases around answers."""

from __future__ import annotations

import functools
import re
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

_SCALES = (1_000, 1_000_000, 1_000_000_000, 1_000_000_000_000)


@functools.cache
def load() -> dict[str, Any]:
    """The tables `units`, `prefixes`, `numbers` and `phrases`."""
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def phrases(name: str) -> str:
    """A regex alternation of one list of phrases, longest first."""
    return "|".join(re.escape(phrase) for phrase in sorted(load()["phrases"][name], key=len, reverse=True))


def number_from_words(text: str) -> Fraction | None:
    """`twenty-one` is 21, `three hundred and five` is 305; None for anything else."""
    numbers: dict[str, int] = load()["numbers"]
    words = re.findall(r"[a-z]+", text.lower())
    if not words or words[0] not in numbers or re.search(r"[^A-Za-z\s-]", text):
        return None
    fraction = re.fullmatch(r"([a-z]+)[\s-]+([a-z]+?)s?", text.strip().lower())
    if fraction is not None and fraction[1] in numbers and fraction[2] in load()["fractions"]:
        return Fraction(numbers[fraction[1]], load()["fractions"][fraction[2]])
    if any(word not in numbers and word != "and" for word in words):
        return None
    total = group = 0
    for value in (numbers[word] for word in words if word != "and"):
        if value in _SCALES:
            total, group = total + max(group, 1) * value, 0
        else:
            group = max(group, 1) * value if value == 100 else group + value
    return Fraction(total + group)
