"""Numbers within an absolute tolerance that the problem states (OlympiadBench's `error`)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from fractions import Fraction

from gxpo_trainer.verify.evaluate import DIGITS, Undefined, no_symbols, precise, rational_value, symbols, value_at
from gxpo_trainer.verify.expression import Node
from gxpo_trainer.verify.relations import is_assignment, value_of
from gxpo_trainer.verify.scalar import read
from gxpo_trainer.verify.structure import Answer, Relation, Scalar, Sequence
from gxpo_trainer.verify.tokens import TooLarge
from gxpo_trainer.verify.units import Unit

MAX_MATCHED = 60
LARGEST = 10**300


def within(gold: Answer, answer: Answer, tolerance: Items[float], unit: Unit | None) -> bool:
    """Whether all values of the answer lie within the tolerance of the gold's, in any order. `unit`: of both.

    False when a side is not made of real constants, or the numbers of values differ.
    """
    golds, answers = _values(gold, unit), _values(answer, unit)
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


def _values(answer: Answer, unit: Unit | None) -> list[Fraction] | None:
    """The numbers of a scalar or of a list, in multiples of `unit`; None when a part is no real constant."""
    if isinstance(answer, Relation):
        text = value_of(answer) if is_assignment(answer) else None
        return None if text is None else _values(Scalar(text), unit)
    if isinstance(answer, Sequence):
        parts = [_values(item, unit) for item in answer.items]
        return None if None in parts else [value for part in parts for value in part or ()]
    if not isinstance(answer, Scalar):
        return None
    try:
        reading = read(answer.text)
        value = None if reading.node is None else constant_value(reading.node)
    except (Undefined, TooLarge):
        return None
    if value is None or reading.unit is None or unit is None or reading.unit.dimension != unit.dimension:
        return None if value is None else [value]
    return [value * reading.unit.size / unit.size]


def constant_value(node: Node) -> Fraction:
    """A real constant, exactly where it is rational, else to `DIGITS` digits. Raises Undefined, TooLarge."""
    if symbols(node):
        raise Undefined
    exact = rational_value(node)
    if exact is not None:
        return exact
    context = precise()
    value = value_at(node, context, no_symbols, real=True)
    if isinstance(value, context.mpc) or not context.isfinite(value):
        raise Undefined
    if abs(value) > LARGEST:
        raise TooLarge
    return Fraction(0) if abs(value) * LARGEST < 1 else Fraction(context.nstr(value, DIGITS))
