"""Values of closed-form expressions, and their equality as functions by evaluation.

Rational constants are compared exactly. Everything else is evaluated at fixed pseudo-random points: on both signs, from
a twentieth to hundreds, and where functions branch (an absolute value, a root, a logarithm, a maximum) around all
constants of both sides. Two sides that agree in double precision at all of them, and in `DIGITS - 10` digits (of what
is larger than 1, so many behind the point) at `PRECISE_POINTS`, are equal: by Schwartz-Zippel for polynomials, and for
elementary functions no identity is known to fail it. Points where a side leaves the reals are left out unless a side is
complex.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath

from gxpo_trainer.grading.expression import Node
from gxpo_trainer.grading.latex import TooLarge

DIGITS = 40
MAX_DIGITS = 256 * DIGITS
"""To which an irrational value is computed."""
MAX_BITS = 100_000
MAX_FACTORIAL = 5_000
MAX_LOG = 200_000.0
"""Of a computed power or exponential, as a natural logarithm of its size."""
_LARGEST = {
    **dict.fromkeys("sin cos tan cot sec csc sinh cosh tanh coth".split(), 1e9),
    **dict.fromkeys(("factorial", "factorial2", "binomial"), 1e6),
    "exp": MAX_LOG,
}
"""Size of the arguments that a function is computed for."""
_CHOSEN: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil}
_COUNTS: dict[str, Callable[..., int]] = {
    "factorial": math.factorial,
    "factorial2": lambda n: math.prod(range(n, 0, -2)),
    "binomial": math.comb,
}
_ARITHMETIC = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}


class Undefined(Exception):
    """No value at this point: division by zero, a root of a negative number, a logarithm of zero."""


class _Irrational(Exception):
    """The constant has no exact value as a fraction."""


Point = Callable[[str], Fraction]
"""The value of each symbol by its name."""


def no_symbols(name: str) -> Fraction:
    raise Undefined


@functools.cache
def precise(digits: int = DIGITS) -> Any:
    context = mpmath.mp.clone()
    context.dps = digits
    return context


def subtrees(node: Node) -> Iterator[Node]:
    yield node
    for arg in node.args:
        yield from subtrees(arg)


def substituted(node: Node, values: Mapping[str, Node]) -> Node:
    if node.kind == "sym":
        return values.get(node.name, node)
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args))


def symbols(node: Node) -> set[str]:
    """Names of the free symbols and unknown functions."""
    return {p.name + ("()" if p.kind == "apply" else "") for p in subtrees(node) if p.kind in ("sym", "apply")}


def are_real(*nodes: Node) -> bool:
    """Whether the imaginary unit occurs in none of them."""
    parts = (part for node in nodes for part in subtrees(node))
    return not any((part.kind, part.name) in (("const", "i"), ("call", "cis")) for part in parts)


def rational_value(node: Node) -> Fraction | None:
    """Exact value of a rational constant; None of other operations. Raises TooLarge, Undefined."""
    try:
        value: Fraction = value_at(node, None, no_symbols, real=True)
    except _Irrational:
        return None
    return value


def constant_value(node: Node) -> Fraction | None:
    """A real constant, exactly where it is rational, else to `DIGITS` digits; None for all else. Raises TooLarge."""
    try:
        exact = rational_value(node)
        value = None if exact is not None else value_at(node, precise(), no_symbols, real=True)
    except Undefined:
        return None
    if exact is None and not isinstance(value, precise().mpc) and precise().isfinite(value):
        return Fraction(precise().nstr(value, DIGITS))
    return exact


def value_at(node: Node, context: Any, point: Point, real: bool) -> Any:
    """Value of the expression at a point, in `context`: mpmath.fp, mp, or None for exact fractions.

    real: roots and logarithms of negative numbers are undefined.

    Raises Undefined, TooLarge.
    """
    try:
        return _value(node, context, point, real)
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined from error
    except OverflowError as error:
        raise TooLarge from error


def _value(node: Node, context: Any, point: Point, real: bool) -> Any:
    kind = node.kind
    if kind in ("num", "sym"):
        value = node.value if kind == "num" else point(node.name)
        return value if context is None else context.mpf(value.numerator) / value.denominator
    if context is None and kind in ("const", "apply"):
        raise _Irrational
    if kind == "const":
        return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[node.name]
    values = [_value(arg, context, point, real) for arg in node.args]
    if kind == "neg":
        return -values[0]
    if kind in _ARITHMETIC:
        result = functools.reduce(_ARITHMETIC[kind], values)
        if context is None and result.numerator.bit_length() + result.denominator.bit_length() > MAX_BITS:
            raise TooLarge
        return result
    if kind == "apply":
        # An arbitrary smooth function of the arguments, the same for the same name.
        seed = context.mpf(zlib.crc32(node.name.encode()) % 1009 + 1) / 512
        return seed + sum(context.sin(value * (i + 1) + seed) for i, value in enumerate(values))
    if context is None:
        return _exact_power(*values) if kind == "pow" else _exact_call(node.name, values)
    return _call(node.name, values, context, real) if kind == "call" else _power(values[0], values[1], context, real)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _Irrational
    if base == 0 and exponent <= 0:
        raise Undefined
    if abs(base) == 1:
        return base ** int(exponent % 2)
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > MAX_BITS:
        # Perhaps still computable in floating point, which has its own limit.
        raise _Irrational
    return base ** int(exponent)


def _exact_call(name: str, values: list[Fraction]) -> Fraction:
    if name in _CHOSEN:
        return Fraction(_CHOSEN[name](*values))
    if name not in _COUNTS or not all(value.denominator == 1 and 0 <= value <= MAX_FACTORIAL for value in values):
        raise _Irrational
    return Fraction(_COUNTS[name](*map(int, values)))


def _power(base: Any, exponent: Any, context: Any, real: bool) -> Any:
    if real and base < 0 and exponent != int(exponent):
        raise Undefined
    if base == 0:
        if context.re(exponent) <= 0:
            raise Undefined
        return base
    if abs(exponent) > 1 and abs(exponent) * max(1, abs(context.log(abs(base)))) > MAX_LOG:
        raise TooLarge
    return base**exponent


def _call(name: str, values: list[Any], context: Any, real: bool) -> Any:
    x = values[0]
    if any(abs(value) > _LARGEST.get(name, math.inf) for value in values):
        raise TooLarge
    if name in ("min", "max") and any(isinstance(value, context.mpc) for value in values):
        raise Undefined
    if name in _CHOSEN and name not in ("floor", "ceil"):
        return _CHOSEN[name](*values)
    if name in _COUNTS and all(value == int(context.re(value)) and 0 <= value <= MAX_FACTORIAL for value in values):
        return context.mpf(_COUNTS[name](*map(int, values)))  # mpmath takes seconds for thousands of digits
    if name in ("ln", "log"):
        if x == 0 or (real and x < 0):
            raise Undefined
        # Base 10 or base e is not stated: both sides mean the same by it, so any fixed base will do.
        return context.log(x) if name == "ln" else context.log(x) / context.log(values[1] if len(values) > 1 else 10)
    if name == "cis":
        return context.exp(context.mpc(0, 1) * x)
    # arcsin is asin, arsinh is asinh, arcosh is acosh.
    name = re.sub("^arc?(?!osh)", "a", name).replace("factorial2", "fac2")
    # mpmath's double-precision context lacks the rarer inverse functions.
    result = getattr(context if hasattr(context, name) else precise(), name)(*values)
    if real and result.imag:
        raise Undefined
    return result


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


def expressions_equal(a: Node, b: Node, *, scaled: bool = False) -> bool:
    """Whether two expressions are equal. scaled: a factor that may have no finite decimal form was cancelled.

    Raises TooLarge when a magnitude is beyond what is computed here.
    """
    decimal = any(part.kind == "num" and part.name == "." for node in (a, b) for part in subtrees(node))
    try:
        if not symbols(a) and not symbols(b):
            exact_a, exact_b = rational_value(a), rational_value(b)
            if exact_a is not None and exact_b is not None:
                return values_equal(exact_a, exact_b, decimal=decimal)
        rounded = decimal and (scaled or not (_is_finite(a) and _is_finite(b)))
    except Undefined:
        return False
    tolerance = DECIMAL_TOLERANCE if rounded else None
    domains = (True, False) if are_real(a, b) else (False,)
    verdicts = (_agree(a, b, real=real, tolerance=tolerance) for real in domains)
    return next((verdict for verdict in verdicts if verdict is not None), False)


def values_equal(a: Fraction, b: Fraction, *, decimal: bool) -> bool:
    """Equal, or within `DECIMAL_TOLERANCE` where one is a decimal and the other has no finite decimal form."""
    near = decimal and not (finite_decimal(a) and finite_decimal(b))
    return a == b or (near and abs(a - b) <= DECIMAL_TOLERANCE * max(abs(a), abs(b)))


def _is_finite(node: Node) -> bool:
    """Whether all its coefficients have a finite decimal form: numbers, letters, their sums, products and powers.

    Raises Undefined, TooLarge.
    """
    if node.kind == "div":
        inverse = Node("pow", (node.args[1], Node("num", value=Fraction(-1))))
        return _is_finite(node.args[0]) and _is_finite(inverse)
    if node.kind == "num" or (node.kind == "pow" and not symbols(node)):
        value = rational_value(node)
        return value is not None and finite_decimal(value)
    if node.kind == "pow":
        base, exponent = node.args
        times = None if symbols(exponent) else rational_value(exponent)
        counted = times is None or (times >= 0 and times.denominator == 1)
        return (counted or base.kind == "sym") and _is_finite(base) and _is_finite(exponent)
    known = node.kind in ("sym", "neg", "add", "mul") or (node.kind, node.name) == ("const", "i")
    return known and all(map(_is_finite, node.args))


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


def _points(a: Node, b: Node) -> Iterator[Point]:
    """Fixed points; where functions branch also points next to, between and beyond all constants of both sides."""
    names = symbols(a) | symbols(b)
    if not names:
        yield no_symbols
        return
    parts = [part for node in (a, b) for part in subtrees(node)]
    naturals = [lambda name, n=n: Fraction(n + zlib.crc32(name.encode()) % 5) for n in range(1, 13)]
    # (-1)^n and the like have no real value between whole numbers.
    powers = [part.args for part in parts if part.kind == "pow"]
    if any(base.kind == "neg" and not symbols(base) and symbols(exponent) for base, exponent in powers):
        yield from naturals
        return
    yield from (_point(scale, signs, index) for index, (scale, signs) in enumerate(_SCALES))
    calls = {part.name for part in parts if part.kind == "call" and symbols(part)}
    if calls & _STEPS:
        yield from (_point(3, "+", index) for index in range(20, 28))
        yield from naturals
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
    if not symbols(a) and not symbols(b):
        return _equal_precisely(a, b, no_symbols, real, tolerance)
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
    if valid >= NEEDED_POINTS:
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


def _equal_precisely(
    a: Node, b: Node, point: Point, real: bool, tolerance: Fraction | None, digits: int = DIGITS
) -> bool | None:
    """Whether the values agree to `DIGITS - 10` digits, of those above 1 behind the point; None where one is undefined.

    Raises TooLarge.
    """
    context = precise(digits)
    try:
        fine_a, fine_b = (value_at(node, context, point, real) for node in (a, b))
    except Undefined:
        return None
    scale = max(abs(fine_a), abs(fine_b))
    if tolerance is not None:
        return bool(abs(fine_a - fine_b) <= context.mpf(tolerance.numerator) / tolerance.denominator * scale)
    if scale > context.mpf(10) ** (digits - DIGITS + 5):
        if digits >= MAX_DIGITS:
            raise TooLarge
        return _equal_precisely(a, b, point, real, tolerance, 2 * digits)
    return bool(abs(fine_a - fine_b) <= context.mpf(10) ** (10 - DIGITS) * min(1, max(scale, context.mpf(10) ** -20)))


def proportional(a: Node, b: Node) -> int:
    """Sign of c when a = c·b for a constant c other than 0; 0 when there is none.

    Two equations `a = 0` and `b = 0` with a = c·b have the same solutions. Raises TooLarge.
    """
    elsewhere = {name: Node("sym", name=f"{name}'") for name in symbols(a) | symbols(b)}
    products = [Node("mul", (a, substituted(b, elsewhere))), Node("mul", (substituted(a, elsewhere), b))]
    if not expressions_equal(*products, scaled=True):
        return 0
    for point in _points(a, b):
        values = [_try(node, point, real=True) for node in (a, b)]
        if not any(isinstance(value, Exception) or value == 0 for value in values):
            return 1 if not are_real(a, b) or values[0] / values[1] > 0 else -1
    return 0
