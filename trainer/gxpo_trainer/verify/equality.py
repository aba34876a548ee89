"""Equality of expressions as functions, by evaluation.

Rational constants are compared exactly. Everything else is evaluated at fixed pseudo-random points: on both signs, from
a twentieth to hundreds, and on both sides of every branch (of an absolute value, a root, a logarithm, a maximum) that
the candidates reach. Two sides that agree in double precision at all of them, and in `DIGITS - 10` digits at
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
MAX_BRANCH_POINTS = 24
_BRANCHING = ("abs", "sqrt", "ln", "log", "min", "max")
_STEPS = ("floor", "ceil")
_SCALES: tuple[tuple[int | str, str], ...] = (
    *((1, "+"), (1, "±"), ("1/3", "+"), ("1/3", "-"), (5, "+"), (5, "±"), ("1/20", "-"), (40, "+"), (40, "±")),
    *((1, "±"), ("1/3", "±"), (300, "±")),
)


def expressions_equal(a: Node, b: Node) -> bool:
    """Whether two expressions are equal. Raises TooLarge when a magnitude is beyond what is computed here."""
    constant = not symbols(a) and not symbols(b)
    decimal = is_decimal(a) or is_decimal(b)
    if constant:
        try:
            exact_a, exact_b = rational_value(a), rational_value(b)
        except Undefined:
            return False
        if exact_a is not None and exact_b is not None:
            return values_equal(exact_a, exact_b, decimal=decimal)
    tolerance = DECIMAL_TOLERANCE if decimal else None
    if constant:
        points = [_point(1, "+", 0)]
    elif _alternates(a) or _alternates(b):
        points = [_integers(index) for index in range(1, 13)]
    else:
        points = list(_points(a, b))
    real = not (is_complex(a) or is_complex(b))
    verdict = _agree(a, b, points, real=real, tolerance=tolerance)
    if verdict is None and real:
        verdict = _agree(a, b, points, real=False, tolerance=tolerance)
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
    """Whether the value has a finite decimal form, that is a denominator of twos and fives."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _point(scale: int | str, signs: str, index: int) -> Point:
    """Values of pseudo-random size between 1/4 and 9/4 of `scale`, that depend on the name and the index only."""

    def value(name: str) -> Fraction:
        seed = zlib.crc32(f"{index}:{name}".encode())
        size = (Fraction(seed % 1_000_003, 500_009) + Fraction(1, 4)) * Fraction(scale)
        return -size if signs == "-" or (signs == "±" and seed % 2) else size

    return value


def _near(candidate: Fraction, mixed: bool) -> Point:
    """All symbols at about the candidate, each a little off in its own way, and with signs of their own if `mixed`."""

    def value(name: str) -> Fraction:
        seed = zlib.crc32(name.encode())
        near = candidate * (1 + Fraction(seed % 1009, 100_000))
        return -near if mixed and seed // 1009 % 2 else near

    return value


def _integers(index: int) -> Point:
    """Natural numbers."""
    return lambda name: Fraction(index + zlib.crc32(name.encode()) % 5)


def _points(a: Node, b: Node) -> Iterator[Point]:
    """The fixed points, then those that put a branch on a side where no earlier point had it."""
    fixed = [_point(scale, signs, index) for index, (scale, signs) in enumerate(_SCALES)]
    yield from fixed
    calls = [part for node in (a, b) for part in subtrees(node) if part.kind == "call"]
    if any(call.name in _STEPS for call in calls):
        yield from (_point(11, "+", index) for index in range(20, 28))
        yield from (_integers(index) for index in range(1, 13))
    arguments = [call.args[0] for call in calls if call.name in _BRANCHING and symbols(call.args[0])]
    arguments += [
        Node("add", (call.args[0], Node("neg", (other,))))
        for call in calls
        if call.name in ("min", "max")
        for other in call.args[1:]
    ]
    if not arguments:
        return
    seen = {_sides(arguments, point) for point in fixed}
    found = 0
    for candidate, mixed in itertools.product(_candidates(a, b), (False, True)):
        point = _near(candidate, mixed)
        sides = _sides(arguments, point)
        if sides not in seen and found < MAX_BRANCH_POINTS:
            seen.add(sides)
            found += 1
            yield point


def _candidates(a: Node, b: Node) -> Iterator[Fraction]:
    """Numbers between, around and beyond the constants of both sides, and powers of two."""
    constants = {part.value for node in (a, b) for part in subtrees(node) if part.kind == "num" and part.value}
    known = sorted({sign * value for value in list(constants)[:16] for sign in (1, -1)} | {Fraction(0)})
    yield from ((low + high) / 2 for low, high in itertools.pairwise(known))
    yield from (
        value * factor for value in known for factor in (Fraction(9, 10), Fraction(11, 10), Fraction(2)) if value
    )
    yield from (sign * Fraction(2) ** power for power in range(-10, 17) for sign in (1, -1))


def _sides(arguments: list[Node], point: Point) -> tuple[int, ...]:
    """Sign of each branch argument; 0 where it has no real value."""
    return tuple(_sign(argument, point) for argument in arguments)


def _sign(node: Node, point: Point) -> int:
    try:
        value = value_at(node, mpmath.fp, point, real=True)
        return 1 if value > 0 else -1
    except (Undefined, TooLarge, TypeError):
        return 0


def _agree(a: Node, b: Node, points: list[Point], *, real: bool, tolerance: Fraction | None) -> bool | None:
    """Whether the sides agree wherever both have a value; None when there are too few such points.

    Raises TooLarge when no point has a value and one was too large for it.
    """
    # Of several letters some are positive by their meaning: (v/g)^{1/n} is v^{1/n}/g^{1/n}.
    narrow = len(symbols(a)) == 1 and symbols(a) == symbols(b)
    valid = checked = 0
    too_large = False
    for point in points:
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
        if checked < PRECISE_POINTS or not _close(*values):
            checked += 1
            if not _equal_precisely(a, b, point, real, tolerance):
                return False
    if valid >= min(NEEDED_POINTS, len(points)):
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


def _close(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= FLOAT_TOLERANCE * max(abs(a), abs(b), 1e-9))


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
