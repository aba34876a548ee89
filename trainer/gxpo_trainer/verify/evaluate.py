"""Equality of closed-form expressions by evaluation.

Rational constants are compared exactly. Everything else is evaluated at fixed pseudo-random points, first in
double precision (which settles almost every unequal pair), then in `DIGITS` digits. Two answers that agree to
`DIGITS - 10` digits at several points are equal as functions (Schwartz-Zippel for polynomials; for elementary
functions an identity that fails does not survive it in practice). This is what sympy's `simplify` is asked for,
hundreds of times faster and without its hangs. Points where a side leaves the reals (a root of a negative number)
are skipped unless the answer is complex.
"""

from __future__ import annotations

import functools
import math
import zlib
from fractions import Fraction
from typing import Any

import mpmath

from gxpo_trainer.verify.exact import DECIMAL_TOLERANCE, finite_decimal
from gxpo_trainer.verify.expression import Node

DIGITS = 40
MAX_BITS = 20_000
MAX_FACTORIAL = 2_000
MAX_LOG2 = float(1 << 40)
FLOAT_TOLERANCE = 1e-8
POINTS = 8
NEEDED_POINTS = 2
STEP_POINTS = 8
STEP_NEEDED_POINTS = 6


class Undefined(Exception):
    """No value at this point: division by zero, a root of a negative number, a logarithm of zero."""


class TooLarge(Exception):
    """The magnitude is beyond anything that is computed here."""


@functools.cache
def _precise() -> Any:
    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols and unknown functions."""
    found = (
        frozenset({node.name + ("()" if node.kind == "apply" else "")})
        if node.kind in ("sym", "apply")
        else frozenset()
    )
    return found.union(*(symbols(arg) for arg in node.args)) if node.args else found


def _contains(node: Node, kind: str, name: str) -> bool:
    return (node.kind == kind and node.name == name) or any(_contains(arg, kind, name) for arg in node.args)


def is_decimal(node: Node) -> bool:
    """Whether a number with a decimal point occurs."""
    return _contains(node, "num", ".")


def is_complex(node: Node) -> bool:
    return _contains(node, "const", "i")


def rational_value(node: Node) -> Fraction | None:
    """Exact value of a rational constant; None when it is not made of rational operations. Raises TooLarge,
    Undefined."""
    if node.kind == "num":
        return node.value
    if node.kind not in ("add", "mul", "div", "neg", "pow") and not (
        node.kind == "call" and node.name in ("factorial", "binomial", "abs", "floor", "ceil")
    ):
        return None
    values: list[Fraction] = []
    for arg in node.args:
        value = rational_value(arg)
        if value is None:
            return None
        values.append(value)
    return _rational_operation(node, values)


def _rational_operation(node: Node, values: list[Fraction]) -> Fraction | None:
    if node.kind == "add":
        return sum(values, Fraction(0))
    if node.kind == "mul":
        product = values[0] * values[1]
        if product.numerator.bit_length() + product.denominator.bit_length() > MAX_BITS:
            raise TooLarge
        return product
    if node.kind == "neg":
        return -values[0]
    if node.kind == "div":
        if values[1] == 0:
            raise Undefined
        return values[0] / values[1]
    if node.kind == "pow":
        return _rational_power(values[0], values[1])
    return _rational_call(node.name, values)


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise Undefined
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > MAX_BITS:
        # Perhaps still computable in floating point, which has its own limit.
        return None
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return base ** int(exponent)


def _rational_call(name: str, values: list[Fraction]) -> Fraction | None:
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        return Fraction(values[0].__floor__() if name == "floor" else values[0].__ceil__())
    if any(value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL for value in values):
        return None
    integers = [int(value) for value in values]
    return Fraction(math.factorial(integers[0]) if name == "factorial" else math.comb(*integers))


def value_at(node: Node, context: Any, point: int, real: bool) -> Any:
    """Value of the expression with symbols set to the point's numbers, in `context` (mpmath.fp or mp).

    Raises Undefined, TooLarge.
    """
    try:
        return _value(node, context, point, real)
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined from error
    except OverflowError as error:
        raise TooLarge from error


def _value(node: Node, context: Any, point: int, real: bool) -> Any:
    kind = node.kind
    if kind == "num":
        return context.mpf(node.value.numerator) / node.value.denominator
    if kind == "sym":
        return _symbol_value(node.name, context, point)
    if kind == "const":
        return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[node.name]
    values = [_value(arg, context, point, real) for arg in node.args]
    if kind == "add":
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total
    if kind == "neg":
        return -values[0]
    if kind == "mul":
        return values[0] * values[1]
    if kind == "div":
        return values[0] / values[1]
    if kind == "pow":
        return _power(values[0], values[1], context, real)
    if kind == "apply":
        return _unknown_function(node.name, values, context)
    return _call(node.name, values, context, real)


def _symbol_value(name: str, context: Any, point: int) -> Any:
    """A number that depends on the name and the point only: between 1/4 and 9/4, or 1/12 and 3/4 at points 2, 3, 6
    and 7 (inside the domain of \\sqrt{1 - x^2}), up to 25 from `STEP_POINTS` on; odd points flip some signs."""
    seed = zlib.crc32(f"{point}:{name}".encode())
    value = context.mpf(seed % 1_000_003) / 500_009 + context.mpf(1) / 4
    if point >= STEP_POINTS:
        value = value * 11
    elif point & 2:
        value = value / 3
    return -value if point % 2 and seed % 3 == 0 else value


def _unknown_function(name: str, values: list[Any], context: Any) -> Any:
    """An arbitrary smooth function of the arguments, the same for the same name."""
    seed = context.mpf(zlib.crc32(name.encode()) % 1009 + 1) / 512
    total = seed
    for i, value in enumerate(values):
        total = total + context.sin(value * (i + 1) + seed)
    return total


def _power(base: Any, exponent: Any, context: Any, real: bool) -> Any:
    if real and base < 0 and exponent != int(exponent):
        raise Undefined
    if base == 0:
        if context.re(exponent) <= 0:
            raise Undefined
        return base
    if abs(exponent) > 1:
        size = abs(exponent) * abs(context.log(abs(base)))
        if size > MAX_LOG2 or abs(exponent) > MAX_LOG2:
            raise TooLarge
    return base**exponent


def _call(name: str, values: list[Any], context: Any, real: bool) -> Any:
    x = values[0]
    if name == "sqrt":
        return _root(x, values[1] if len(values) > 1 else 2, context, real)
    if name in ("ln", "log"):
        if x == 0 or (real and x < 0):
            raise Undefined
        if name == "log" and len(values) == 1:
            # Base 10 or base e is not said: both sides mean the same by it, so any fixed base will do.
            return context.log(x) / context.log(10)
        return context.log(x) if len(values) == 1 else context.log(x) / context.log(values[1])
    if name == "exp":
        if abs(x) > MAX_LOG2:
            raise TooLarge
        return context.exp(x)
    if name in ("arcsin", "arccos") and real and abs(x) > 1:
        raise Undefined
    if name == "factorial":
        if abs(x) > 1e6:
            raise TooLarge
        return context.gamma(x + 1)
    if name == "binomial":
        if any(abs(value) > 1e6 for value in values):
            raise TooLarge
        return context.binomial(*values)
    if name == "abs":
        return abs(x)
    if name in ("floor", "ceil"):
        return getattr(context, name)(x)
    return getattr(context, name.replace("arc", "a"))(x)


def _root(x: Any, index: Any, context: Any, real: bool) -> Any:
    """The index-th root; real odd roots of negative numbers are negative."""
    if x == 0:
        return x
    if real and x < 0:
        if index == int(index) and int(index) % 2 == 1:
            return -((-x) ** (context.mpf(1) / index))
        raise Undefined
    return context.sqrt(x) if index == 2 else x ** (context.mpf(1) / index)


def expressions_equal(a: Node, b: Node) -> bool | None:
    """Whether two expressions are equal; None when that cannot be decided here. Raises TooLarge when a side is."""
    names_a, names_b = symbols(a), symbols(b)
    decimal = is_decimal(a) or is_decimal(b)
    if not names_a and not names_b:
        try:
            exact_a, exact_b = rational_value(a), rational_value(b)
        except Undefined:
            return None
        if exact_a is not None and exact_b is not None:
            if exact_a == exact_b or not decimal or (finite_decimal(exact_a) and finite_decimal(exact_b)):
                return exact_a == exact_b
            return abs(exact_a - exact_b) <= DECIMAL_TOLERANCE * max(abs(exact_a), abs(exact_b))
    real = not (is_complex(a) or is_complex(b))
    tolerance = float(DECIMAL_TOLERANCE) if decimal else None
    return _agree(a, b, real, tolerance, constant=not (names_a | names_b))


def _agree(a: Node, b: Node, real: bool, tolerance: float | None, *, constant: bool) -> bool | None:
    steps = any(_contains(node, "call", name) for node in (a, b) for name in ("floor", "ceil"))
    # A step function is constant over short stretches: more points, farther apart.
    first, needed = (STEP_POINTS, STEP_NEEDED_POINTS) if steps else (0, NEEDED_POINTS)
    points = 0
    for point in range(1) if constant else range(first, first + POINTS):
        try:
            found = _agree_at(a, b, point, real, tolerance)
        except Undefined:
            continue
        if not found:
            return False
        points += 1
        if points > needed:
            break
    return True if points >= (1 if constant else needed) else None


def _agree_at(a: Node, b: Node, point: int, real: bool, tolerance: float | None) -> bool:
    """Whether the sides agree at one point: in double precision first, then, if they seem to, in many digits."""
    try:
        rough_a, rough_b = (value_at(node, mpmath.fp, point, real) for node in (a, b))
    except TooLarge:
        rough_a = rough_b = None
    if rough_a is not None:
        scale = max(abs(rough_a), abs(rough_b))
        if (
            scale == scale
            and scale < 1e300
            and abs(rough_a - rough_b) > max(tolerance or 0.0, FLOAT_TOLERANCE) * max(scale, 1e-3)
        ):
            return False
    precise = _precise()
    fine_a, fine_b = (value_at(node, precise, point, real) for node in (a, b))
    difference, scale = abs(fine_a - fine_b), max(abs(fine_a), abs(fine_b))
    if tolerance is not None:
        return bool(difference <= precise.mpf(tolerance) * scale)
    return bool(difference <= precise.mpf(10) ** (10 - DIGITS) * max(scale, precise.mpf(10) ** -20))


def proportional(a: Node, b: Node) -> int | None:
    """Sign of c when a = c·b for a constant c other than 0; 0 when there is none; None when undecided.

    Two equations `a = 0` and `b = 0` with a = c·b have the same solutions. Raises TooLarge.
    """
    real = not (is_complex(a) or is_complex(b))
    precise = _precise()
    ratio = None
    points = 0
    for point in range(2 * POINTS):
        try:
            value_a, value_b = (value_at(node, precise, point, real) for node in (a, b))
        except Undefined:
            continue
        tiny = precise.mpf(10) ** (12 - DIGITS)
        if abs(value_a) < tiny or abs(value_b) < tiny:
            if max(abs(value_a), abs(value_b)) > tiny:
                return 0
            continue
        here = value_a / value_b
        if ratio is not None and abs(here - ratio) > tiny * abs(ratio):
            return 0
        ratio = here
        points += 1
        if points > NEEDED_POINTS:
            break
    if ratio is None or points < NEEDED_POINTS:
        return None
    return 1 if not real or ratio > 0 else -1
