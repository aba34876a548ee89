"""Equality of two scalar answers: numbers, expressions, words, times, numbers in other bases.

A scalar is read once: its value as an expression tree, its mark (percent, degrees), its unit, or its words. Two
readings are compared alike on both sides; where one side states a unit, a percent sign or a degree sign and the other
does not, the bare side may mean either. What cannot be read is left to math-verify.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.equality import constant_value, expressions_equal, symbols
from gxpo_trainer.grading.expression import Node, number, parse_expression
from gxpo_trainer.grading.latex import Unsupported, same_tokens
from gxpo_trainer.grading.units import PHRASES, WORDS, Unit, number_from_words, parse_unit, split_unit

_BASE = re.compile(
    r"(?P<sign>-?)\(?(?P<digits>[0-9A-Z]+(?:\.[0-9A-Z]+)?)\)?_\{?(?:\\text\{)?(?P<base>[0-9]{1,2}|[a-z]+)\}?\}?"
)
_CLOCK = re.compile(
    r"(?P<time>[0-9]{1,2}(?:(?::[0-9]{2}){1,2}|(?=\s*(?:\\text\{\s*)?[ap]\.?\s?m)))\s*"
    r"(?:\\text\{\s*)?(?P<half>[ap]\.?\s?m\.?)?(?:\s*\})?",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[.:)])\s*(?=[^\s,;])")
_CHOICE = re.compile(r"(?:\\text\{)?\s*\(?\s*([A-Ja-j])\s*[).:]?\s*\}?\.?")
_ORDINAL = re.compile(r"([0-9])\s*\^?\s*\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?(?![A-Za-z])")
_TO = re.compile(r"(?<=[0-9])\s*(?:\\text\{\s*to\s*\}|to)\s*(?=[0-9])")
_LEADING_TEXT = re.compile(r"\\text\{[^{}]*\}\s*(?=[-0-9\\(])")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)
_SHORT_WORDS = frozenset("no on yes not odd max min all any day mon tue wed thu fri sat sun".split())
_CHANGED = re.compile(
    rf"(?<![A-Za-z\\])(?:(?:{PHRASES['before_number']})\s*\}}?\s*[-+(]*[0-9\\]|(?:{PHRASES['after_number']})(?![A-Za-z]))",
    re.IGNORECASE,
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis)")

EXACT = Fraction(0)
"""Tolerance under which only equal numbers are equal."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The meaning of a scalar. `node` is its value without mark (`%`, `°`, `°C`) and unit; `words` are its letters when
    it has nothing else, or words that say that another value is meant (`less than 5`)."""

    node: Node | None
    mark: str = ""
    unit: Unit | None = None
    words: str | None = None


def scalars_equal(gold: str, answer: str, tolerance: Fraction = EXACT) -> bool | None:
    """Whether two scalars are the same answer; None when neither we nor math-verify can read them. Raises TooLarge.

    tolerance: largest difference of two real constants, in the gold's unit.
    """
    if same_tokens(gold, answer) or same_tokens(_unwrapped(gold), _unwrapped(answer)):
        return True
    gold, answer = (_TO.sub(":", side) for side in (gold, answer))
    for test in (_based_numbers, _clock_times):
        if (verdict := test(gold, answer)) is not None:
            return verdict
    a, b = read(gold), read(answer)
    if a.words is not None and b.words is not None and (verdict := _words_equal(a.words, b.words)) is not None:
        return verdict
    if a.node is not None and b.node is not None:
        if (verdict := _values_equal(a, b, tolerance)) or (a.unit is None) == (b.unit is None):
            return verdict
        # A letter that looks like a unit may be a factor: 5 m and 2m + 3m.
        whole, other = _parsed(gold), _parsed(answer)
        return whole is not None and other is not None and expressions_equal(whole, other)
    if (a.node or a.words) and (b.node or b.words):
        return False
    return engine_equal(split_unit(gold)[0], split_unit(answer)[0])


def has_letters(text: str) -> bool:
    """Whether the scalar is an expression that we read and that has variables."""
    node = read(text).node
    return node is not None and bool(symbols(node))


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """The reading of one scalar. Raises TooLarge."""
    words = _as_words(text)
    if words is None and _CHANGED.search(text):
        return Reading(None, words=" ".join(_unwrapped(text).casefold().split()))
    value, behind = split_unit(_ORDINAL.sub(r"\1", text) if "^" in text or text[-1:].isalpha() else text)
    unit = parse_unit(behind) if behind else None
    mark = "%" if value.endswith("%") else ""
    value = value.removesuffix("%")
    # In `\sin 30^\circ` the degrees stay.
    if not mark and "\\circ" in value and not _TRIGONOMETRIC.search(value):
        scale = re.search(r"\^\\circ\s*([CFK]?)(?![A-Za-z])", value)
        value, mark = re.sub(r"\^\\circ(?:\s*[CFK](?![A-Za-z]))?", "", value), f"°{scale[1] if scale else ''}"
    if words is not None and (spelled := number_from_words(_unwrapped(text))) is not None:
        return Reading(number(spelled), words=words)
    node = _parsed(value)
    if node is None and (remark := _LEADING_TEXT.match(text)) is not None:
        return read(text[remark.end() :])
    if node is None and "\\text" in value:
        node = _parsed(_TEXT.sub(" ", value))
    return Reading(node, mark, unit, words)


def _parsed(text: str) -> Node | None:
    try:
        return parse_expression(text)
    except Unsupported:
        return None


def _values_equal(gold: Reading, answer: Reading, tolerance: Fraction) -> bool:
    marks = {gold.mark, answer.mark} - {""}
    if len(marks) > 1 and ("%" in marks or "°" not in marks):
        return False  # percent and degrees, or temperatures of two scales
    if any(mark[1:] for mark in marks):
        if gold.unit or answer.unit:
            return False
        gold, answer = replace(gold, mark=""), replace(answer, mark="")
    # 45° against a unit such as radians is a quantity too.
    degrees = parse_unit("deg")
    gold, answer = (
        replace(side, mark="", unit=degrees) if side.mark == "°" and other.unit is not None else side
        for side, other in ((gold, answer), (answer, gold))
    )
    a, b = gold.node, answer.node
    assert a is not None and b is not None  # noqa: PT018
    if gold.unit is not None and answer.unit is not None:
        a, b = Node("mul", (a, number(gold.unit.size))), Node("mul", (b, number(answer.unit.size)))
        return gold.unit.dimension == answer.unit.dimension and _near(a, b, tolerance * gold.unit.size)
    return _near(a, b, tolerance) or (
        gold.mark != answer.mark and expressions_equal(_marked_value(a, gold.mark), _marked_value(b, answer.mark))
    )


def _near(a: Node, b: Node, tolerance: Fraction) -> bool:
    """Equal, or real constants that differ by at most the tolerance. Raises TooLarge."""
    if (equal := expressions_equal(a, b)) or not tolerance:
        return equal
    values = constant_value(a), constant_value(b)
    return values[0] is not None and values[1] is not None and abs(values[0] - values[1]) <= tolerance


def _marked_value(node: Node, mark: str) -> Node:
    """28 % as 0.28; 90 degrees as pi/2."""
    if mark == "°":
        node = Node("mul", (node, Node("const", name="pi")))
    return Node("div", (node, number({"%": 100, "°": 180}[mark]))) if mark else node


def choice_letters(gold: str, answer: str) -> bool | None:
    """A gold that is one choice letter: `(B)`, `B.` and `(B) 12` are the choice B.

    None when the gold is no choice, or the answer names none.
    """
    alone = _CHOICE.fullmatch(gold.strip())
    if alone is None:
        return None
    if len(gold.strip()) == 1 and len(answer.strip()) == 1:
        return gold.strip() == answer.strip()
    letter = alone[1].upper()
    choice = _CHOICE.fullmatch(answer.strip())
    if choice is not None:
        return choice[1].upper() == letter
    label = _LABEL.match(answer.strip())
    if label is None:
        return None
    behind = re.sub(r"[A-J]\)", "(", answer[label.end() :])
    if re.search(r"\(\s*[A-J]?\s*[()]|(?:^|[\s,])[A-J]\s*(?:$|,)", behind):
        # Several choices where one was asked for.
        return False
    return (label[1] or label[2]) == letter


def _based_numbers(gold: str, answer: str) -> bool | None:
    """Numbers with a base as subscript: the same digits in the same base; a number without its base is another."""
    a, b = _based(gold), _based(answer)
    if a is not None and b is not None:
        return a == b
    return False if (a and read(answer).node is not None) or (b and read(gold).node is not None) else None


def _based(s: str) -> tuple[str, str, Fraction] | None:
    """(sign, digits, base)."""
    match = _BASE.fullmatch(re.sub(r"\s", "", s)) if "_" in s else None
    if match is None or not re.search("[0-9]", match["digits"]):
        return None
    base = number_from_words(match["base"]) if match["base"].isalpha() else Fraction(match["base"])
    return None if base is None else (match["sign"], match["digits"].lstrip("0"), base)


def _clock_times(gold: str, answer: str) -> bool | None:
    """12:00, 7:05 p.m., 9 a.m.; where only one side names the half of the day, the other may mean either."""
    a, b = (_CLOCK.fullmatch(side.strip()) for side in (gold, answer))
    if a is None or b is None:
        return None
    halves = {clock["half"][0].lower() for clock in (a, b) if clock["half"]}
    times = [[int(part) for part in clock["time"].split(":")] for clock in (a, b)]
    of_day = [[*time, 0, 0][:3] for time in times]
    return len(halves) <= 1 and of_day[0] == of_day[1]


def _words_equal(a: str, b: str) -> bool | None:
    """Words without case, blanks and articles. `no` is not `on`."""
    phrases = WORDS["phrases"]
    if a == b or any(a in phrases[kind] and b in phrases[kind] for kind in ("nothing", "everything")):
        return True
    if len(a) == 1 and len(b) == 1:
        return None
    # Short runs of letters may be products, which commute; longer ones are words.
    return False if max(len(a), len(b)) > 3 or {a, b} & _SHORT_WORDS else None


def _unwrapped(s: str) -> str:
    return _TEXT.sub(r" \1 ", s).strip()


def _as_words(s: str) -> str | None:
    """Letters only, lower case; None when the text holds anything but letters and light punctuation."""
    s = _ARTICLE.sub("", _unwrapped(s.replace("\\emptyset", "emptyset").replace("\\mathbb{R}", "reals")))
    if re.search(r"[0-9\\^_=<>|/+*()\[\]{}!]|^-", s) or not re.search(r"[^\W\d_]", s):
        return None
    # Single letters with an operator or a prime between are algebra (n-k, f'), not a word such as x-axis.
    if re.search("[-−–'’:]", s) and not re.search(r"[^\W\d_]{3}", s):
        return None
    letters = re.sub(r"[\W_]+", "", s)
    return letters if len(letters) == 1 else letters.casefold()
