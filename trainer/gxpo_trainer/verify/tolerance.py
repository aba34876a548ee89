"""Numbers within an absolute tolerance that the problem states (OlympiadBench's `error`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from fractions import Fraction
from typing import Any

from gxpo_trainer.verify.evaluate import DIGITS, TooLarge, Undefined, rational_value, symbols, value_at
from gxpo_trainer.verify.exact import read_number
from gxpo_trainer.verify.expression import Node, Unsupported, parse_expression
from gxpo_trainer.verify.relations import is_assignment, value_of
from gxpo_trainer.verify.structure import Answer, Relation, Scalar, Sequence
from gxpo_trainer.verify.units import drop_units

MAX_MATCHED = 60
LARGEST = 10**300


def within(gold: Answer, answer: Answer, tolerance: Items[float]) -> bool:
    """Whether all values of the answer lie within the tolerance of the gold's, in any order.

    False when a side is not made of real constants, or the numbers of values differ.
    """
    golds, answers = _values(gold), _values(answer)
    if golds is None or answers is None or len(golds) != len(answers) or len(golds) > MAX_MATCHED:
        return False
    # Of the decimal as it is written: 0.1 is one tenth.
    limits = [Fraction(str(value)) for value in tolerance]
    limits = limits if len(limits) == len(golds) else limits[:1] * len(golds)
    left = list(answers)
    # The tightest first, and each takes its nearest: right where golds are farther apart than their tolerances.
    for limit, wanted in sorted(zip(limits, golds, strict=True)):
        nearest = min(left, key=lambda value: abs(value - wanted))
        if abs(nearest - wanted) > limit:
            return False
        left.remove(nearest)
    return True


def _values(answer: Answer) -> list[Fraction] | None:
    """The numbers of a scalar or of a list; None when a part is no real constant."""
    if isinstance(answer, Relation):
        text = value_of(answer) if is_assignment(answer) else None
        return None if text is None else _values(Scalar(text))
    if isinstance(answer, Sequence):
        parts = [_values(item) for item in answer.items]
        return None if None in parts else [value for part in parts for value in part or ()]
    if not isinstance(answer, Scalar):
        return None
    text = drop_units(answer.text.rstrip(" %"))
    plain = read_number(text)
    if plain is not None:
        return [plain.value]
    try:
        return [constant_value(parse_expression(text))]
    except (Unsupported, Undefined, TooLarge):
        return None


def constant_value(node: Node) -> Fraction:
    """A real constant, exactly where it is rational, else to `DIGITS` digits. Raises Undefined, TooLarge."""
    if symbols(node):
        raise Undefined
    exact = rational_value(node)
    if exact is not None:
        return exact
    context = _precise()
    value = value_at(node, context, 0, real=True)
    if isinstance(value, context.mpc) or not context.isfinite(value):
        raise Undefined
    if abs(value) > LARGEST:
        raise TooLarge
    return Fraction(0) if abs(value) * LARGEST < 1 else Fraction(context.nstr(value, DIGITS))


@functools.cache
def _precise() -> Any:
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context
