"""Values of closed-form expressions: exactly for rational constants, in a chosen precision at a point otherwise."""

from __future__ import annotations

import functools
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from gxpo_trainer.verify.expression import Node
from gxpo_trainer.verify.tokens import TooLarge

DIGITS = 40
MAX_BITS = 20_000
MAX_FACTORIAL = 2_000
MAX_LOG = 200_000.0
"""Of a computed power or exponential, as a natural logarithm of its size."""
_LARGEST = {
    **dict.fromkeys("sin cos tan cot sec csc sinh cosh tanh coth".split(), 1e9),
    **dict.fromkeys(("factorial", "factorial2", "binomial"), 1e6),
    "exp": MAX_LOG,
}
"""Size of the arguments that a function is computed for."""
_CHOSEN: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil}
_ARITHMETIC = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}


class Undefined(Exception):
    """No value at this point: division by zero, a root of a negative number, a logarithm of zero."""


class _Irrational(Exception):
    """The constant has no exact value as a fraction."""


Point = Callable[[str], Fraction]
"""The value of each symbol by its name."""


def no_symbols(name: str) -> Fraction:
    """The point of a constant."""
    raise Undefined


@functools.cache
def precise() -> Any:
    """The mpmath context of `DIGITS` digits."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def subtrees(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    for arg in node.args:
        yield from subtrees(arg)


def substituted(node: Node, values: Mapping[str, Node]) -> Node:
    """The expression with symbols replaced by expressions."""
    if node.kind == "sym":
        return values.get(node.name, node)
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args))


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols and unknown functions."""
    return frozenset(
        part.name + ("()" if part.kind == "apply" else "") for part in subtrees(node) if part.kind in ("sym", "apply")
    )


def is_decimal(node: Node) -> bool:
    """Whether a number with a decimal point occurs."""
    return any(part.kind == "num" and part.name == "." for part in subtrees(node))


def is_complex(node: Node) -> bool:
    return any((part.kind, part.name) in (("const", "i"), ("call", "cis")) for part in subtrees(node))


def rational_value(node: Node) -> Fraction | None:
    """Exact value of a rational constant; None when it is not made of rational operations. Raises TooLarge,
    Undefined."""
    try:
        value: Fraction = value_at(node, None, no_symbols, real=True)
    except _Irrational:
        return None
    return value


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
        return _unknown_function(node.name, values, context)
    if context is None:
        return _exact_power(*values) if kind == "pow" else _exact_call(node.name, values)
    if kind == "call":
        return _call(node.name, values, context, real)
    base, exponent = values
    if real and base < 0 and (odd_root := _odd_root(node.args[1])) is not None:
        size = _power(-base, exponent, context, real)
        return -size if odd_root.numerator % 2 else size
    return _power(base, exponent, context, real)


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
    counted = all(value.denominator == 1 and 0 <= value <= MAX_FACTORIAL for value in values)
    if not counted or name not in ("factorial", "factorial2", "binomial"):
        raise _Irrational
    integers = [int(value) for value in values]
    if name == "factorial2":
        return Fraction(math.prod(range(integers[0], 0, -2)))
    return Fraction(math.factorial(integers[0]) if name == "factorial" else math.comb(*integers))


def _unknown_function(name: str, values: list[Any], context: Any) -> Any:
    """An arbitrary smooth function of the arguments, the same for the same name."""
    seed = context.mpf(zlib.crc32(name.encode()) % 1009 + 1) / 512
    return seed + sum(context.sin(value * (i + 1) + seed) for i, value in enumerate(values))


def _odd_root(exponent: Node) -> Fraction | None:
    """The exponent when it is a fraction p/q with an odd q > 1: a real power of a negative number."""
    try:
        value = rational_value(exponent)
    except (Undefined, TooLarge):
        return None
    return value if value is not None and value.denominator > 1 and value.denominator % 2 else None


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
    if name in _CHOSEN and name not in ("floor", "ceil"):
        return _CHOSEN[name](*values)
    if name in ("ln", "log"):
        if x == 0 or (real and x < 0):
            raise Undefined
        # Base 10 or base e is not said: both sides mean the same by it, so any fixed base will do.
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
