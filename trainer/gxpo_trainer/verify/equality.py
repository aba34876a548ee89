"""Equality of expressions as functions, by evaluation.

Rational constants are compared exactly. Everything else is evaluated at fixed pseudo-random points: on both signs, from
a twentieth to hundreds, and where functions branch (an absolute value, a root, a logarithm, a maximum) around all
constants of both sides. Two sides that agree in double precision at all of them, and in `DIGITS - 10` digits at
`PRECISE_POINTS`, are equal: by Schwartz-Zippel for polynomials, and for elementary functions no identity is known to
fail it. Points where a side leaves the reals are left out unless a side is complex.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath

from gxpo_trainer.verify.evaluate import (
    DIGITS,
    Point,
    Undefined,
    is_complex,
    is_decimal,
    no_symbols,
    precise,
    rational_value,
    substituted,
    subtrees,
    symbols,
    value_at,
)
from gxpo_trainer.verify.expression import Node
from gxpo_trainer.verify.tokens import TooLarge

DECIMAL_TOLERANCE = Fraction(1, 10_000)
"""Relative error of a decimal that stands for a value without a finite decimal form (1/3, a root)."""
PRECISE_POINTS = 3
NEEDED_POINTS = 2
FLOAT_TOLERANCE = 1e-9
_BRANCHING = {"abs", "sqrt", "ln", "log", "min", "max"}
_STEPS = {"floor", "ceil"}
_SCALES: tuple[tuple[int | str, str], ...] = (
    *(("1/4", "+"), ("1/4", "±"), ("1/12", "+"), ("1/12", "-"), ("5/4", "+"), ("5/4", "±"), ("1/80", "-"), (10, "+")),
    *((10, "±"), ("1/4", "±"), ("1/12", "±"), (75, "±")),
)


def expressions_equal(a: Node, b: Node) -> bool:
    """Whether two expressions are equal. Raises TooLarge when a magnitude is beyond what is computed here."""
    decimal = is_decimal(a) or is_decimal(b)
    if not symbols(a) and not symbols(b):
        try:
            exact_a, exact_b = rational_value(a), rational_value(b)
        except Undefined:
            return False
        if exact_a is not None and exact_b is not None:
            return values_equal(exact_a, exact_b, decimal=decimal)
    tolerance = DECIMAL_TOLERANCE if decimal else None
    real = not (is_complex(a) or is_complex(b))
    verdict = _agree(a, b, real=real, tolerance=tolerance)
    if verdict is None and real:
        verdict = _agree(a, b, real=False, tolerance=tolerance)
    return bool(verdict)


def _alternates(node: Node) -> bool:
    """Whether a formula such as (-1)^n has no real value between whole numbers."""
    return any(
        part.kind == "pow" and part.args[0].kind == "neg" and not symbols(part.args[0]) and symbols(part.args[1])
        for part in subtrees(node)
    )


def values_equal(a: Fraction, b: Fraction, *, decimal: bool) -> bool:
    """Equal, or within `DECIMAL_TOLERANCE` where one is a decimal and the other has no finite decimal form."""
    if a == b:
        return True
    if not decimal or (finite_decimal(a) and finite_decimal(b)):
        return False
    return abs(a - b) <= DECIMAL_TOLERANCE * max(abs(a), abs(b))


def finite_decimal(value: Fraction) -> bool:
    """Whether the value has a finite decimal form, that is a denominator which divides a power of ten."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def _point(scale: Fraction | int | str, signs: str, index: int, spread: Fraction | int = 8) -> Point:
    """Values of pseudo-random size, from `scale` to 1 + `spread` times it, that depend on name and index only."""

    def value(name: str) -> Fraction:
        seed = zlib.crc32(f"{index}:{name}".encode())
        size = (1 + spread * Fraction(seed % 1_000_003, 1_000_003)) * Fraction(scale)
        return -size if signs == "-" or (signs == "±" and seed // 1009 % 2) else size

    return value


def _integers(index: int) -> Point:
    """Natural numbers."""
    return lambda name: Fraction(index + zlib.crc32(name.encode()) % 5)


def _points(a: Node, b: Node) -> Iterator[Point]:
    """Fixed points; where functions branch also points next to, between and beyond all constants of both sides."""
    names = symbols(a) | symbols(b)
    if not names:
        yield no_symbols
        return
    if _alternates(a) or _alternates(b):
        yield from (_integers(index) for index in range(1, 13))
        return
    yield from (_point(scale, signs, index) for index, (scale, signs) in enumerate(_SCALES))
    parts = [part for node in (a, b) for part in subtrees(node)]
    calls = {part.name for part in parts if part.kind == "call" and symbols(part)}
    if calls & _STEPS:
        yield from (_point(3, "+", index) for index in range(20, 28))
        yield from (_integers(index) for index in range(1, 13))
    if calls & _BRANCHING:
        constants = {part.value for part in parts if part.kind == "num" and part.value}
        for index, candidate in enumerate(_candidates(list(constants)[:16])):
            # Each symbol a little off in its own way, and several also with signs of their own.
            yield from (_point(candidate, sign, index, Fraction(1, 100)) for sign in ("+±" if len(names) > 1 else "+"))


def _candidates(constants: list[Fraction]) -> Iterator[Fraction]:
    """Numbers between, around and beyond the constants and their negatives, and powers of two."""
    known = sorted({sign * value for value in constants for sign in (1, -1)} | {Fraction(0)})
    yield from ((low + high) / 2 for low, high in itertools.pairwise(known))
    yield from (value * Fraction(tenths, 10) for value in known for tenths in (9, 11, 20) if value)
    yield from (sign * Fraction(2) ** power for power in range(-10, 17, 2) for sign in (1, -1))


def _agree(a: Node, b: Node, *, real: bool, tolerance: Fraction | None) -> bool | None:
    """Whether the sides agree wherever both have a value; None when there are too few such points.

    Raises TooLarge when no point has a value and one was too large for it.
    """
    # Of several letters some are positive by their meaning: (v/g)^{1/n} is v^{1/n}/g^{1/n}.
    narrow = len(symbols(a)) == 1 and symbols(a) == symbols(b)
    valid = checked = 0
    too_large = False
    for point in _points(a, b):
        values = [_try(node, point, real) for node in (a, b)]
        if any(isinstance(value, TooLarge) for value in values):
            too_large = True
            continue
        undefined = [isinstance(value, Undefined) for value in values]
        if any(undefined):
            if narrow and not all(undefined):
                # ln(x^2) has values where 2 ln x has none.
                return False
            continue
        valid += 1
        x, y = values
        if checked < PRECISE_POINTS or abs(x - y) > FLOAT_TOLERANCE * max(abs(x), abs(y), 1e-9):
            checked += 1
            if not _equal_precisely(a, b, point, real, tolerance):
                return False
    if valid >= (NEEDED_POINTS if symbols(a) | symbols(b) else 1):
        return True
    if too_large:
        raise TooLarge
    return None


def _try(node: Node, point: Point, real: bool) -> Any:
    """The value in double precision, or the exception that says why there is none."""
    try:
        value = value_at(node, mpmath.fp, point, real)
    except (Undefined, TooLarge) as error:
        return error
    if value != value:
        return Undefined()
    return TooLarge() if abs(value) > 1e290 or 0 < abs(value) < 1e-290 else value


def _equal_precisely(a: Node, b: Node, point: Point, real: bool, tolerance: Fraction | None) -> bool:
    context = precise()
    try:
        fine_a, fine_b = (value_at(node, context, point, real) for node in (a, b))
    except Undefined:
        return False
    difference, scale = abs(fine_a - fine_b), max(abs(fine_a), abs(fine_b))
    if tolerance is not None:
        return bool(difference <= context.mpf(tolerance.numerator) / tolerance.denominator * scale)
    return bool(difference <= context.mpf(10) ** (10 - DIGITS) * max(scale, context.mpf(10) ** -20))


def proportional(a: Node, b: Node) -> int:
    """Sign of c when a = c·b for a constant c other than 0; 0 when there is none.

    Two equations `a = 0` and `b = 0` with a = c·b have the same solutions. Raises TooLarge.
    """
    elsewhere = {name: Node("sym", name=f"{name}'") for name in symbols(a) | symbols(b)}
    products = [Node("mul", (a, substituted(b, elsewhere))), Node("mul", (substituted(a, elsewhere), b))]
    if not expressions_equal(*products):
        return 0
    for point in _points(a, b):
        values = [_try(node, point, real=True) for node in (a, b)]
        if not any(isinstance(value, Exception) or value == 0 for value in values):
            return 1 if is_complex(a) or is_complex(b) or values[0] / values[1] > 0 else -1
    return 0
