"""Answers in another unit than the gold's: `0.75 hours` answers 45 with the unit `minute`.

Only units of one quantity are converted into each other. What is not in the table, or is of another quantity, stays
as it is and is dropped later, as everywhere else.
"""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITIES: dict[str, dict[str, Fraction | int]] = {
    "time": {
        "ms": Fraction(1, 1000), "s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1, "min": 60, "mins": 60,
        "minute": 60, "minutes": 60, "h": 3600, "hr": 3600, "hrs": 3600, "hour": 3600, "hours": 3600, "day": 86400,
        "days": 86400, "week": 604800, "weeks": 604800,
    },
    "length": {
        "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "dm": Fraction(1, 10), "m": 1, "meter": 1, "meters": 1,
        "metre": 1, "metres": 1, "centimeter": Fraction(1, 100), "centimeters": Fraction(1, 100), "km": 1000,
        "kilometer": 1000, "kilometers": 1000, "kilometre": 1000, "kilometres": 1000,
    },
    "area": {"mm^2": Fraction(1, 10**6), "cm^2": Fraction(1, 10**4), "dm^2": Fraction(1, 100), "m^2": 1,
             "km^2": 10**6},
    "volume": {"mm^3": Fraction(1, 10**9), "cm^3": Fraction(1, 10**6), "m^3": 1},
    "speed": {
        "m/s": 1, "km/s": 1000, "km/h": Fraction(5, 18), "kmh": Fraction(5, 18), "kph": Fraction(5, 18),
        "km/hr": Fraction(5, 18), "km/min": Fraction(50, 3), "m/min": Fraction(1, 60),
    },
    "mass": {"mg": Fraction(1, 1000), "g": 1, "gram": 1, "grams": 1, "kg": 1000, "kilogram": 1000, "kilograms": 1000},
}  # fmt: skip
_FACTORS = {name: (quantity, Fraction(size)) for quantity, units in _QUANTITIES.items() for name, size in units.items()}
_NAMES = "|".join(sorted(map(re.escape, _FACTORS), key=len, reverse=True))
_STATED = re.compile(rf"(?P<value>.*[0-9)}}\]]|.*\\pi|.*[0-9]\.)\s*(?<![A-Za-z\\])(?P<unit>{_NAMES})\.?", re.DOTALL)
_UPRIGHT = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname|rm)\s*\{([^{}]*)\}")
_BLANKS = re.compile(r"\\[,;:! ]|~|\$|\\q?quad(?![A-Za-z])")
MAX_CHARS = 200


def in_unit(answer: str, unit: str) -> str:
    """The answer as a multiple of `unit`; the answer itself when it states no other unit of the same quantity."""
    wanted = _FACTORS.get(_plain(unit))
    if wanted is None or len(answer) > MAX_CHARS:
        return answer
    stated = _STATED.fullmatch(_plain(answer))
    if stated is None:
        return answer
    quantity, size = _FACTORS[stated["unit"]]
    if quantity != wanted[0]:
        return answer
    factor = size / wanted[1]
    if factor == 1:
        return stated["value"]
    return f"({stated['value']})\\cdot\\frac{{{factor.numerator}}}{{{factor.denominator}}}"


def _plain(text: str) -> str:
    r"""Units set upright, blanks and dollar signs gone: `166\mathrm{~cm}^{2}` -> `166 cm^2`."""
    text = _BLANKS.sub(" ", _UPRIGHT.sub(r" \1 ", text))
    text = re.sub(r"\s*\^\s*\{?\s*([23])\s*\}?\s*$", r"^\1", text.strip())
    return re.sub(r"\s*/\s*(?=[A-Za-z]+$)", "/", text).strip()
