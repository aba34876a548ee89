"""Equality of two scalar answers: numbers, expressions, words, ratios, numbers in other bases.

Every test says True, False, or None for "not my kind"; the first that knows decides, and math-verify comes last.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from gxpo_trainer.verify.engine import engine_equal
from gxpo_trainer.verify.evaluate import TooLarge, expressions_equal
from gxpo_trainer.verify.exact import numbers_equal, read_number
from gxpo_trainer.verify.expression import Node, Unsupported, number, parse_expression
from gxpo_trainer.verify.units import drop_units

Test = Callable[[str, str], bool | None]

_BASE = re.compile(
    r"(?P<sign>-?)(?P<digits>[0-9A-Z]+(?:\.[0-9A-Z]+)?)_\{?(?:\\text\{)?(?P<base>[0-9]{1,2}|two|ten)\}?\}?"
)
_CLOCK = re.compile(r"(?P<h>[0-9]{1,2}):(?P<m>[0-9]{2})(?::[0-9]{2})?\s*(?P<half>[ap]\.?m\.?)?", re.IGNORECASE)
_LETTER = re.compile(r"\(?\s*([A-J])\s*[).:]?")
_LETTER_WITH_TEXT = re.compile(r"(?:\(\s*(?=[A-J]\s*\)\s*[^\s+\-*/^(]))?([A-J])\s*[).:]\s*\S.*", re.DOTALL)
_NOTHING = frozenset(
    (
        "nosolution",
        "nosolutions",
        "norealsolution",
        "norealsolutions",
        "none",
        "emptyset",
        "noneexist",
        "dne",
        "doesnotexist",
    )
)
_SHORT_WORDS = frozenset("no on yes not one two six ten odd max min all any day mon tue wed thu fri sat sun".split())
_CARDINALS = {
    word: Fraction(value)
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
}
_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)


def scalars_equal(gold: str, answer: str) -> bool | None:
    """Whether two scalars are the same answer; None when neither we nor math-verify can read them."""
    if _squeezed(gold) == _squeezed(answer) and gold:
        return True
    for test in TESTS:
        verdict = test(gold, answer)
        if verdict is not None:
            return verdict
    return None


def _squeezed(s: str) -> str:
    """Without braces and blanks, except between digits: `1 2` is not 12."""
    return re.sub(r"[\s{}]", "", re.sub(r"(?<=[0-9])\s+(?=[0-9])", "_", s)).lstrip("+")


def choice_letters(gold: str, answer: str) -> bool | None:
    """A gold that is one choice letter, perhaps with the choice's text: `B`, `(B)`, `B.`, `(B) 12` are that choice."""
    letter = _LETTER.fullmatch(gold.strip()) or _LETTER_WITH_TEXT.fullmatch(gold.strip())
    if letter is None:
        return None
    if len(gold) == len(answer) == 1:
        return gold == answer
    said = re.match(r"(?:\(\s*([A-Ja-j])\s*\)|([A-J])(?:\s*[).:]|$))(?!\s*[,;])", answer.strip())
    if said is None:
        return None
    return (said[1] or said[2]).upper() == letter[1]


def plain_numbers(gold: str, answer: str) -> bool | None:
    """Two plain numbers, with or without units, decided exactly."""
    a, b = read_number(drop_units(gold)), read_number(drop_units(answer))
    return None if a is None or b is None else numbers_equal(a, b)


def infinities(gold: str, answer: str) -> bool | None:
    r"""\infty and -\infty are equal to themselves only."""
    if "\\infty" not in gold and "\\infty" not in answer:
        return None
    a, b = (_squeezed(s) for s in (gold, answer))
    known = {"\\infty", "-\\infty"}
    return a == b if a in known or b in known else None


def based_numbers(gold: str, answer: str) -> bool | None:
    """Numbers with a base as subscript: the same digits in the same base, or the same value in a stated base."""
    a, b = (_based(s) for s in (gold, answer))
    if a is None and b is None:
        return None
    if a is None or b is None:
        # The base was asked for: a bare number is another number.
        return False if _readings(gold if a is None else answer) else None
    return a["base"] == b["base"] and _squeezed(gold).lstrip("0") == _squeezed(answer).lstrip("0")


def _based(s: str) -> re.Match[str] | None:
    match = _BASE.fullmatch(re.sub(r"\s", "", s)) if "_" in s else None
    return match if match is not None and re.search("[0-9]", match["digits"]) else None


def clock_times(gold: str, answer: str) -> bool | None:
    """12:00, 7:05 p.m., 19:05; where only one side names the half of the day, the other may be on either clock."""
    a, b = (_CLOCK.fullmatch(s.strip()) for s in (gold, answer))
    if a is None or b is None:
        return None
    if a["m"] != b["m"]:
        return False
    if bool(a["half"]) == bool(b["half"]):
        return _hour(a) == _hour(b)
    return _hour(a) == _hour(b) or int(a["h"]) == int(b["h"])


def _hour(clock: re.Match[str]) -> int:
    """Hour of the day, 0 to 24; 12 a.m. is 0 and 12 p.m. is 12."""
    hour = int(clock["h"])
    if not clock["half"]:
        return hour
    return hour % 12 + (12 if clock["half"][0] in "pP" else 0)


def ratios(gold: str, answer: str) -> bool | None:
    """a:b:c against a:b:c, up to a common factor; a:b against the fraction a/b."""
    if ":" not in gold and ":" not in answer:
        return None
    a, b = (_ratio_parts(s) for s in (gold, answer))
    if all(_CLOCK.fullmatch(side.strip()) for side in (gold, answer) if ":" in side):
        # 9:24 may be a time of day, which is no fraction; clock_times has compared two such.
        return False
    a, b = a or _as_ratio(gold), b or _as_ratio(answer)
    if a is None or b is None:
        return None
    if len(a) != len(b):
        return False
    pairs = list(zip(a, b, strict=True))
    return all(x * pairs[0][1] == y * pairs[0][0] for x, y in pairs)


def _ratio_parts(s: str) -> list[Fraction] | None:
    parts = [read_number(part.strip()) for part in s.split(":")]
    if len(parts) < 2 or any(part is None or part.value == 0 for part in parts):
        return None
    return [part.value for part in parts if part is not None]


def _as_ratio(s: str) -> list[Fraction] | None:
    value = read_number(s)
    return None if value is None or value.value == 0 else [value.value, Fraction(1)]


def words(gold: str, answer: str) -> bool | None:
    """Answers in words: letters only, compared without case, blanks and articles. `no` is not `on`."""
    a, b = (_as_words(s) for s in (gold, answer))
    if a is None or b is None:
        return None
    if a == b or (a in _NOTHING and b in _NOTHING):
        return True
    if len(a) == 1 and len(b) == 1:
        return None
    # Short runs of letters may be products, which commute; longer ones are words.
    return False if max(len(a), len(b)) > 3 or {a, b} & _SHORT_WORDS else None


def _as_words(s: str) -> str | None:
    """Letters only, lower case; None when the text holds anything but letters and light punctuation."""
    s = s.replace("\\emptyset", "emptyset")
    s = _ARTICLE.sub("", re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", s).strip())
    if re.search(r"[0-9\\^_=<>|/+*()\[\]!]|^-", s) or not re.search(r"[^\W\d_]", s):
        return None
    letters = re.sub(r"[\W_]+", "", s)
    return letters if len(letters) == 1 else letters.casefold()


def number_words(gold: str, answer: str) -> bool | None:
    """`four` is 4."""
    a, b = (_CARDINALS.get(s.strip().lower()) for s in (gold, answer))
    if (a is None) == (b is None):
        return None
    other = read_number(drop_units(answer if b is None else gold))
    return None if other is None else other.value == (a if b is None else b)


def expressions(gold: str, answer: str) -> bool | None:
    """Closed-form expressions, by evaluation; percent and degrees have two readings."""
    readings = [_gold_readings(gold), _readings(answer)]
    if not readings[0] or not readings[1]:
        return None
    flagged = [_flag(s) for s in (gold, answer)]
    undecided = False
    for i, a in enumerate(readings[0]):
        for j, b in enumerate(readings[1]):
            if i and j and flagged[0] == flagged[1]:
                continue
            try:
                verdict = expressions_equal(a, b)
            except TooLarge:
                verdict = False
            if verdict:
                return True
            undecided |= verdict is None
    return None if undecided else False


def _flag(s: str) -> str:
    return "%" if s.rstrip().endswith("%") else "°" if "\\circ" in s else ""


def _readings(s: str) -> list[Node]:
    r"""Trees of what the text may mean: 28 % is 28 or 0.28; 90^\circ is 90 or \pi/2. Empty when unsupported."""
    angles = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", s) is not None
    text = s if angles else re.sub(r"\^\\circ(?:\s*[CF](?![A-Za-z]))?", "", s)
    bare = drop_units(text.replace("%", " ")).strip()
    try:
        node = parse_expression(bare)
    except Unsupported:
        return []
    flag = _flag(s)
    if flag == "%":
        return [node, Node("div", (node, number(100)))]
    if flag == "°" and not angles:
        return [node, Node("div", (Node("mul", (node, Node("const", name="pi"))), number(180)))]
    return [node]


def understood(text: str) -> bool:
    """Whether our own tests know what this scalar is, so that it needs no second opinion from math-verify."""
    return bool("\\infty" in text or _based(text) or _readings(text) or _as_words(text))


_gold_readings = functools.lru_cache(maxsize=1024)(_readings)


def by_engine(gold: str, answer: str) -> bool | None:
    """math-verify."""
    return engine_equal(drop_units(gold), drop_units(answer))


TESTS: tuple[Test, ...] = (
    choice_letters,
    plain_numbers,
    infinities,
    based_numbers,
    clock_times,
    ratios,
    number_words,
    words,
    expressions,
    by_engine,
)
