"""Numbers within an absolute tolerance that the problem states (OlympiadBench's `error`)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from fractions import Fraction

from gxpo_trainer.verify.compare import MAX_MATCHED
from gxpo_trainer.verify.evaluate import DIGITS, Undefined, no_symbols, precise, rational_value, value_at
from gxpo_trainer.verify.expression import Node
from gxpo_trainer.verify.relations import is_assignment, value_of
from gxpo_trainer.verify.scalar import read
from gxpo_trainer.verify.structure import Answer, Relation, Scalar, Sequence
from gxpo_trainer.verify.units import Unit


def within(gold: Answer, answer: Answer, tolerance: Items[float], unit: Unit | None) -> bool:
    """Whether all values of the answer lie within the tolerance of the gold's, in any order. `unit`: of both.

    False when a side is not made of real constants, or the numbers of values differ. Raises TooLarge.
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
    if isinstance(answer, Relation) and is_assignment(answer):
        return _values(Scalar(value_of(answer) or ""), unit)
    if isinstance(answer, Sequence):
        parts = [_values(item, unit) for item in answer.items]
        return None if None in parts else [value for part in parts for value in part or ()]
    reading = read(answer.text) if isinstance(answer, Scalar) else None
    value = None if reading is None or reading.node is None else _constant_value(reading.node)
    if value is None or reading is None or reading.unit is None or unit is None:
        return None if value is None else [value]
    return [value * reading.unit.size / unit.size] if reading.unit.dimension == unit.dimension else None


def _constant_value(node: Node) -> Fraction | None:
    """A real constant, exactly where it is rational, else to `DIGITS` digits; None for all else. Raises TooLarge."""
    try:
        exact = rational_value(node)
        value = None if exact is not None else value_at(node, precise(), no_symbols, real=True)
    except Undefined:
        return None
    if exact is None and not isinstance(value, precise().mpc) and precise().isfinite(value):
        return Fraction(precise().nstr(value, DIGITS))
    return exact
