"""Plain numbers, decided by rational arithmetic alone.

Most golds of word problems, AMC, AIME and GSM8K are integers, decimals or simple fractions, and so are most
responses to them. Both sides become a `Number` and are compared without any computer algebra: thousands of
comparisons a millisecond-scale budget, no import of sympy.

Tolerance (`numbers_equal`), the only one for plain numbers: two values with finite decimal forms must be equal
exactly; a decimal may stand for a value without a finite decimal form (1/3, a root) when it differs from it by at
most `DECIMAL_TOLERANCE`, relatively.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DECIMAL_TOLERANCE = Fraction(1, 10_000)
MAX_DIGITS = 1_000
MAX_EXPONENT = 10_000

_INTEGER = re.compile(r"-?[0-9]+")
_DIGIT = re.compile(r"[0-9]")
_NO_NUMBER = re.compile(
    r"\\(?!(?:[dtc]?frac|times|cdot|q?quad)(?![A-Za-z])|[,;:! %$])|(?<![A-Za-z\\])[A-DF-Za-df-wyz](?![A-Za-z])"
)
_LIST_COMMA = re.compile(r",(?:\s|\\[,;: ])+[0-9]")
_SPACED_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:(?: |\\[,;: ]|~)[0-9]{3})+(?:\.[0-9]*)?")
_SPACE = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\s+")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:(?:,|\{,\}|_)[0-9]{3})+(?:\.[0-9]*)?")
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<e>[-+]?[0-9]+)|(?:\\times|\\cdot|\*|×|x|·)10(?:\^|\*\*)(?:\{(?P<braced>[-+]?[0-9]+)\}|\(?(?P<bare>[-+]?[0-9]+)\)?))"
)
_FRACTION = re.compile(
    r"(?P<whole>[0-9]+)?\\[dtc]?frac(?:\{(?P<n>[-+]?[0-9.]+)\}|(?P<n1>[0-9]))(?:\{(?P<d>[-+]?[0-9.]+)\}|(?P<d1>[0-9]))"
)
_SLASH = re.compile(r"(?P<n>[0-9]+(?:\.[0-9]+)?)/(?P<d>[-+]?[0-9]+(?:\.[0-9]+)?)")
_MIXED = re.compile(r"(?P<whole>[0-9]+)[ ]+(?P<n>[0-9]+)/(?P<d>[0-9]+)")
_PERCENT = re.compile(r"(?:\\?%|percent|percentage|pct)$")
_CURRENCY = re.compile(r"^([-+]?)(?:\\?\$|€|£|¥)|(?:\\?\$|€|£|¥)$")


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as written. `decimal`: with a decimal point or exponent. `percent`: followed by %."""

    value: Fraction
    decimal: bool = False
    percent: bool = False


def read_number(text: str) -> Number | None:
    """A plain number: integer, decimal, thousands separated, e-notation, fraction, mixed number, percent, currency.

    None for everything else, and for numbers of more than `MAX_DIGITS` digits or an exponent beyond `MAX_EXPONENT`.
    """
    if _INTEGER.fullmatch(text) and len(text) <= MAX_DIGITS:
        return Number(Fraction(int(text)))
    if (
        len(text) > MAX_DIGITS
        or _NO_NUMBER.search(text)
        or _DIGIT.search(text) is None
        or _LIST_COMMA.search(text) is not None
    ):
        return None
    mixed = _mixed_number(text)
    if mixed is not None:
        return mixed
    body = text.strip() if _digits_apart(text) else _SPACE.sub("", text)
    body = body.replace("−", "-").replace("–", "-")
    percent = _PERCENT.search(body)
    if percent is not None:
        body = body[: percent.start()]
    body = _CURRENCY.sub(r"\1", _CURRENCY.sub(r"\1", body))
    sign, body = _sign(body)
    value = _unsigned(body)
    if value is None:
        return None
    return Number(sign * value.value, value.decimal, percent is not None)


def _digits_apart(text: str) -> bool:
    """Whether a space stands between two digits, where dropping it would invent a number ("1 2" is not 12)."""
    return re.search(r"[0-9](?:\s|\\[ ;:]|~|\\q?quad)+[0-9]", text) is not None


def _sign(body: str) -> tuple[int, str]:
    sign = 1
    while body[:1] in ("-", "+"):
        sign = -sign if body[0] == "-" else sign
        body = body[1:]
    return sign, body


def _mixed_number(text: str) -> Number | None:
    """`3 1/2` with a space: three and a half."""
    sign, body = _sign(text.strip())
    match = _MIXED.fullmatch(body)
    if match is None or int(match["d"]) == 0 or int(match["n"]) >= int(match["d"]):
        return None
    return Number(sign * (int(match["whole"]) + Fraction(int(match["n"]), int(match["d"]))))


def _unsigned(body: str) -> Number | None:
    if _PLAIN.fullmatch(body):
        return Number(_decimal(body), "." in body.rstrip("."))
    if _THOUSANDS.fullmatch(body):
        digits = re.sub(r"[,{}_]", "", body)
        return Number(_decimal(digits), "." in digits.rstrip("."))
    if _SPACED_THOUSANDS.fullmatch(body):
        digits = _SPACE.sub("", body)
        return Number(_decimal(digits), "." in digits.rstrip("."))
    return _scientific(body) or _fraction(body)


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.rstrip(".") or "0")


def _scientific(body: str) -> Number | None:
    match = _SCIENTIFIC.fullmatch(body)
    if match is None:
        return None
    exponent = int(match["e"] or match["braced"] or match["bare"])
    if abs(exponent) > MAX_EXPONENT:
        return None
    return Number(_decimal(match["mantissa"]) * Fraction(10) ** exponent, True)


def _fraction(body: str) -> Number | None:
    match = _FRACTION.fullmatch(body)
    if match is not None:
        numerator, denominator = match["n"] or match["n1"], match["d"] or match["d1"]
        whole = int(match["whole"] or 0)
    else:
        match = _SLASH.fullmatch(body)
        if match is None:
            return None
        numerator, denominator, whole = match["n"], match["d"], 0
    try:
        fraction = Fraction(numerator) / Fraction(denominator)
    except (ValueError, ZeroDivisionError):
        return None
    return Number(whole + fraction)


def finite_decimal(value: Fraction) -> bool:
    """Whether the value has a finite decimal form, that is a denominator of twos and fives."""
    denominator = value.denominator
    while denominator % 10 == 0:
        denominator //= 10
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def numbers_equal(a: Number, b: Number) -> bool:
    """Whether two plain numbers are the same answer; 10 % equals both 10 and 0.1, but 10 does not equal 0.1."""
    for x in _percent_readings(a):
        for y in _percent_readings(b):
            if values_equal(x, y, decimal=a.decimal or b.decimal):
                return True
    return False


def _percent_readings(number: Number) -> tuple[Fraction, ...]:
    return (number.value, number.value / 100) if number.percent else (number.value,)


def values_equal(a: Fraction, b: Fraction, *, decimal: bool) -> bool:
    """Equal, or within `DECIMAL_TOLERANCE` where one is a decimal and the other has no finite decimal form."""
    if a == b:
        return True
    if not decimal or (finite_decimal(a) and finite_decimal(b)):
        return False
    return abs(a - b) <= DECIMAL_TOLERANCE * max(abs(a), abs(b))
