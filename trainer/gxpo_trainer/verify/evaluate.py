"""Values of closed-form expressions: exactly for rational constants, in a chosen precision at a point otherwise."""

from __future__ import annotations

import functools
import math
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
MAX_LOG2 = 200_000.0
"""Of a computed power or exponential, as a natural logarithm of its size."""
MAX_ANGLE = 1e9
_RATIONAL_CALLS = ("factorial", "factorial2", "binomial", "abs", "floor", "ceil", "min", "max")
_CHOSEN: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


class Undefined(Exception):
    """No value at this point: division by zero, a root of a negative number, a logarithm of zero."""


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
    if node.kind == "num":
        return node.value
    if node.kind not in ("add", "mul", "div", "neg", "pow") and not (
        node.kind == "call"
        and node.name in ("factorial", "factorial2", "binomial", "abs", "floor", "ceil", "min", "max")
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
    if name in ("abs", "min", "max"):
        return Fraction(_CHOSEN[name](*values))
    if name in ("floor", "ceil"):
        return Fraction(values[0].__floor__() if name == "floor" else values[0].__ceil__())
    if any(value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL for value in values):
        return None
    integers = [int(value) for value in values]
    if name == "factorial2":
        return Fraction(math.prod(range(integers[0], 0, -2)))
    return Fraction(math.factorial(integers[0]) if name == "factorial" else math.comb(*integers))


def value_at(node: Node, context: Any, point: Point, real: bool) -> Any:
    """Value of the expression at a point, in `context` (mpmath.fp or mp).

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
    if kind == "num":
        return context.mpf(node.value.numerator) / node.value.denominator
    if kind == "sym":
        value = point(node.name)
        return context.mpf(value.numerator) / value.denominator
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
        if real and values[0] < 0 and (odd_root := _odd_root(node.args[1])) is not None:
            size = _power(-values[0], values[1], context, real)
            return -size if odd_root.numerator % 2 else size
        return _power(values[0], values[1], context, real)
    if kind == "apply":
        return _unknown_function(node.name, values, context)
    return _call(node.name, values, context, real)


def _unknown_function(name: str, values: list[Any], context: Any) -> Any:
    """An arbitrary smooth function of the arguments, the same for the same name."""
    seed = context.mpf(zlib.crc32(name.encode()) % 1009 + 1) / 512
    total = seed
    for i, value in enumerate(values):
        total = total + context.sin(value * (i + 1) + seed)
    return total


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
    if name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth") and abs(x) > MAX_ANGLE:
        raise TooLarge
    if name in ("factorial", "factorial2"):
        if abs(x) > 1e6:
            raise TooLarge
        return context.gamma(x + 1) if name == "factorial" else context.fac2(x)
    if name == "binomial":
        if any(abs(value) > 1e6 for value in values):
            raise TooLarge
        return context.binomial(*values)
    if name in ("abs", "min", "max"):
        return _CHOSEN[name](*values)
    if name == "cis":
        return context.exp(context.mpc(0, 1) * x)
    if name in ("floor", "ceil"):
        return getattr(context, name)(x)
    name = re.sub("^arc?", "a", name)
    # mpmath's double-precision context lacks the rarer inverse functions.
    return getattr(context if hasattr(context, name) else precise(), name)(x)


def _root(x: Any, index: Any, context: Any, real: bool) -> Any:
    """The index-th root; real odd roots of negative numbers are negative."""
    if x == 0:
        return x
    if real and x < 0:
        if index == int(index) and int(index) % 2 == 1:
            return -((-x) ** (context.mpf(1) / index))
        raise Undefined
    return context.sqrt(x) if index == 2 else x ** (context.mpf(1) / index)
