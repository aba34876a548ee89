r"""Words: units and remarks behind a value (`5 cm^2`, `24\,\text{km}\cdot\text{h}^{-1}`, `12 dogs`), number words, and
phrases around answers, all from the lists of `words.toml`.

A unit that is known has a size and a dimension, so that two values that both state one are compared as quantities.
Unknown words count things or remark on them: they are dropped.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
"""The tables `units`, `prefixes`, `numbers` and `phrases`."""


PHRASES: dict[str, str] = {
    name: "|".join(map(re.escape, sorted(phrases, key=len, reverse=True))) for name, phrases in WORDS["phrases"].items()
}
"""A regex alternation of each list of phrases, longest first."""
_NUMBERS: dict[str, int] = {
    **{word: i for i, word in enumerate(WORDS["numbers"]["small"].split())},
    **{word: 20 + 10 * i for i, word in enumerate(WORDS["numbers"]["tens"].split())},
    **WORDS["numbers"]["large"],
}


def number_from_words(text: str) -> Fraction | None:
    """`twenty-one` is 21, `hundred` 100, `two hundred five` 205; None for anything else."""
    words = re.findall(r"[a-z]+", text.lower())
    if not words or re.search(r"[^A-Za-z\s-]", text) or not all(word in _NUMBERS for word in words):
        return None
    total, part, largest = 0, 0, 10**15
    for value in (_NUMBERS[word] for word in words):
        if value == 100 and part < 100:
            part = max(part, 1) * value
        elif value > 100 and value < largest:
            total, part, largest = total + max(part, 1) * value, 0, value
        elif (part % 100 == 0 and value < 100) or (part % 100 in range(20, 100, 10) and 0 < value < 10):
            part += value
        else:
            return None
    return Fraction(total + part)


_WORD = r"\\text\{[^{}]*\}|(?<![A-Za-z\\])[A-Za-zµμÅΩ]+|\\Omega|%\s*of"
_LAST = re.compile(
    rf"(?P<sep>(?:\s|/|\\cdot(?![A-Za-z])|(?<![A-Za-z])per(?![A-Za-z]))*)(?P<word>{_WORD})"
    r"(?:\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]))?\s*\.?\s*$"
)
_PART = re.compile(
    r"(?P<over>/|(?<![A-Za-z])per(?![A-Za-z]))|(?P<word>[A-Za-zµμÅΩ]+)\.?(?:\s*\^\s*\{?\s*(?P<power>-?[0-9]+)\s*\}?)?|(?P<rest>\S)"
)
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
MAX_UNIT_WORDS = 30
_ATTACHED = frozenset("NJKWVA")
"""Unit letters that may follow a number without a blank; small ones are variables there (`6m`)."""


@dataclass(frozen=True, slots=True)
class Unit:
    """`size` in base units of the `dimension`, a set of (base unit, power)."""

    size: Fraction
    dimension: frozenset[tuple[str, int]]


def split_unit(s: str) -> tuple[str, str]:
    """(value, unit or remark behind it); the second is empty when there is none."""
    value = s.rstrip()
    for number in range(MAX_UNIT_WORDS):
        match = _LAST.search(value)
        if match is None or not _is_behind_value(match["word"], match["sep"], value[: match.start()], first=not number):
            break
        value = value[: match.start()].rstrip(" /")
    return value, s[len(value) :].strip()


def _is_behind_value(word: str, separator: str, before: str, *, first: bool) -> bool:
    """Whether the word is a unit or a counted thing rather than a factor."""
    if word.startswith("\\text"):
        return re.search(r"[0-9A-Za-z]", before) is not None
    if not re.search(r"[0-9]|\\pi", before):
        return False
    end = before.rstrip()[-1:]
    if word == "\\Omega" or word.startswith("%"):
        return end.isdigit()
    if len(word) == 1 and _unit_word(word) is not None:
        last = re.search(r"(?<![A-Za-z\\])([A-Za-zµμΩ]+)\s*$", before)
        behind_value = end.isdigit() or end in (")", "}") or (last is not None and _unit_word(last[1]) is not None)
        attached = end.isdigit() and (word in _ATTACHED or not first)
        return "/" in separator or "\\cdot" in separator or (behind_value and (separator != "" or attached))
    if _unit_word(word) is not None or word in _POWER_WORDS or word in ("of", "the"):
        return end.isdigit() or separator != "" or end in (")", "}")
    return separator != "" and len(word) >= 4 and re.search("[aeiouyAEIOUY]", word) is not None


@functools.lru_cache(maxsize=1024)
def parse_unit(text: str) -> Unit | None:
    """The product of units that `km/h`, `\\text{square feet}` or `m s^{-1}` names; None when a word is unknown."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\mu\s*|[µμ]\s*", "μ", text.replace("\\Omega", "Ω").replace("\\cdot", " ").replace("\\circ", "deg"))
    text = re.sub(r"([A-Za-z]+)\s+(squared|cubed)", r"\2 \1", text)
    size, dimension = Fraction(1), Counter[str]()
    sign = next_power = 1
    unit: Unit | None = None
    for part in _PART.finditer(text):
        word = part["word"]
        if part["over"]:
            sign = -1
        elif part["rest"]:
            if part["rest"] not in "~·*$^{}()":
                return None
        elif word.lower() in _POWER_WORDS:
            next_power = _POWER_WORDS[word.lower()]
        else:
            unit, power = _unit_word(word), sign * next_power * int(part["power"] or 1)
            if unit is None or abs(power) > 9:
                return None
            size *= unit.size**power
            dimension.update({name: exponent * power for name, exponent in unit.dimension})
            next_power = 1
    if unit is None:
        return None
    return Unit(size, frozenset((name, power) for name, power in dimension.items() if power))


def _unit_word(word: str) -> Unit | None:
    """One unit by its symbol or name, in the plural too."""
    names = [word, word.lower()] if len(word) > 3 else [word]
    names += [name[:-1] for name in names if len(name) > 3 and name.endswith("s")]
    return next((_units()[name] for name in names if name in _units()), None)


@functools.cache
def _units() -> dict[str, Unit]:
    """All units by name and symbol, with and without a prefix."""
    units: dict[str, Unit] = {}
    for definition, names in WORDS["units"].items():
        number, *factors = definition.split(" ")
        numerator, _, denominator = number.partition("/")
        powers = (factor.partition("^") for factor in factors)
        dimension = frozenset((name, int(power or 1)) for name, _, power in powers)
        units |= dict.fromkeys(names.split(), Unit(Fraction(numerator) / Fraction(denominator or 1), dimension))
    for prefixes in WORDS["prefixes"].values():
        for prefix, factor in prefixes["factors"].items():
            for stem in prefixes["before"].split():
                units.setdefault(prefix + stem, Unit(units[stem].size * Fraction(factor), units[stem].dimension))
    return units
