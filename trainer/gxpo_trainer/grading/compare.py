r"""Equality of structured answers. `answers_equal(gold, answer)` follows what the gold asks for.

Lists without brackets and sets are unordered, tuples and intervals ordered. A gold in parentheses accepts a bare
list in the same order. `x = 5` answers a gold of 5 and the other way round; names of several values are honoured
when both sides give them. Inequalities, `x \in S` and intervals are compared as sets of reals (`relations.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.relations import (
    as_intervals,
    assigned_name,
    is_assignment,
    relations_equal,
    same_name,
    value_of,
)
from gxpo_trainer.grading.scalar import scalars_equal
from gxpo_trainer.grading.structure import Answer, Matrix, Relation, Scalar, Sequence, Union, parse_answer

MAX_MATCHED = 60


def answers_equal(gold: Answer, answer: Answer) -> bool | None:
    """Whether the answer is the gold; None when that could not be decided. Raises TooLarge."""
    if gold.text and gold.text == answer.text:
        return True
    if same_name(gold, answer):
        return answers_equal(_value(gold), _value(answer))
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return scalars_equal(gold.text, answer.text)
    a, b = as_intervals(gold), as_intervals(answer)
    if a is not None and b is not None and (a, b) != (gold, answer):
        return answers_equal(a, b)
    if isinstance(gold, Sequence) and isinstance(answer, Sequence):
        return _sequences(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return relations_equal(gold, answer)
    if isinstance(gold, Relation):
        value = value_of(gold) if is_assignment(gold) or gold.operators[0] == "\\approx" else None
        return value is not None and answers_equal(parse_answer(value), answer)
    if isinstance(answer, Relation):
        value = value_of(answer)
        return value is not None and answers_equal(gold, parse_answer(value))
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _unordered(gold.items, answer.items)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(gold, answer)
    # One answer against several is equal only where the several are one.
    sides = [_flattened(side) if isinstance(side, Sequence) else (side,) for side in (gold, answer)]
    return len(sides[0]) == len(sides[1]) == 1 and sides != [(gold,), (answer,)] and answers_equal(*sides[0], *sides[1])


def _value(answer: Answer) -> Answer:
    """The value of an assignment; everything else as it is."""
    return parse_answer(value_of(answer) or "") if is_assignment(answer) else answer


def _sequences(gold: Sequence, answer: Sequence) -> bool | None:
    a, b = _flattened(gold), _flattened(answer)
    if len(a) != len(b) and _is_set(gold, a) and _is_set(answer, b):
        return max(len(a), len(b)) <= MAX_MATCHED and all(
            any(answers_equal(item, other) for other in others) for items, others in ((a, b), (b, a)) for item in items
        )
    if len(a) != len(b) or not _brackets_agree(gold, answer):
        return False
    if gold.opening in ("(", "[") or (answer.opening in ("(", "[")):
        return _ordered(map(_value, a), map(_value, b))
    return _lists(a, b)


def _is_set(sequence: Sequence, items: tuple[Answer, ...]) -> bool:
    """Braces, or a list of tuples (solutions), where a repetition adds nothing; a list of numbers counts."""
    solutions = all(isinstance(item, Sequence) and item.opening for item in items)
    return sequence.opening == "{" or (not sequence.opening and solutions)


def _brackets_agree(gold: Sequence, answer: Sequence) -> bool:
    """Two-element brackets may be intervals, where ( and [ differ; a set is never a tuple; bare goes with all."""
    if not gold.opening or not answer.opening:
        return len(gold.items) != 2 or "[" not in (gold.opening, answer.opening)
    if "{" in (gold.opening, answer.opening):
        return gold.opening == answer.opening
    return len(gold.items) != 2 or (gold.opening, gold.closing) == (answer.opening, answer.closing)


def _flattened(sequence: Sequence) -> tuple[Answer, ...]:
    r"""Items with bare inner lists (of \pm) opened up; groups of named values (p=5,q=2; ...) become tuples."""
    items: list[Answer] = []
    for item in sequence.items:
        inner = _value(item) if "\\pm" in item.text else item
        if not isinstance(inner, Sequence) or inner.opening:
            items.append(item)
        elif ";" in sequence.text and "\\pm" not in item.text:
            items.append(Sequence(item.text, tuple(map(_value, inner.items)), "(", ")"))
        else:
            items.extend(_flattened(inner))
    return tuple(items)


def _lists(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    """Bare lists and sets: by names when both sides name all values, in the gold's order when only one side names
    different things or names come again (p = 1, q = 2, p = 3, q = 4), else in any order."""
    names = [tuple(assigned_name(item) for item in items) for items in (gold, answer)]
    named = [None not in side for side in names]
    # x_1 and x_2 are both x.
    different = [len({re.sub(r"_?[0-9]+$", "", name or "") for name in side}) > 1 for side in names]
    values = tuple(map(_value, gold)), tuple(map(_value, answer))
    if all(named) and len(set(names[0])) == len(names[0]) and set(names[0]) == set(names[1]):
        by_name = dict(zip(names[1], values[1], strict=True))
        return _ordered(values[0], (by_name[name] for name in names[0]))
    if all(named) and any(different):
        return names[0] == names[1] and _ordered(*values)
    if named[0] != named[1] and different[named.index(True)]:
        return _ordered(*values)
    return _unordered(*values)


def _ordered(gold: Iterable[Answer], answer: Iterable[Answer]) -> bool | None:
    """Item by item: False when two differ, else None when a pair is undecided."""
    result: bool | None = True
    for a, b in zip(gold, answer, strict=True):
        verdict = answers_equal(a, b)
        if verdict is False:
            return False
        result = result and verdict
    return result


def _unordered(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    """Whether the items pair off (equality is an equivalence, so taking the first match is enough)."""
    if len(gold) != len(answer):
        return False
    if len(gold) > MAX_MATCHED:
        return _ordered(gold, answer)
    left = list(answer)
    for item in gold:
        verdicts = [answers_equal(item, other) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        left.pop(verdicts.index(True))
    return True


def _matrices(gold: Answer, answer: Answer) -> bool | None:
    r"""Entry by entry; a row or column vector equals the tuple of its entries."""
    sides = []
    for side in (gold, answer):
        if isinstance(side, Matrix):
            vector = not side.kind and 1 in (len(side.rows), len(side.rows[0]))
            entries = tuple(entry for row in side.rows for entry in row)
            sides.append((side.kind, [len(row) for row in side.rows], entries, vector))
        elif isinstance(side, Sequence) and side.opening in ("(", "["):
            sides.append(("", [], side.items, True))
    if len(sides) < 2:
        return engine_equal(gold.text, answer.text)
    (kind, shape, entries, vector), (other_kind, other_shape, others, other_vector) = sides
    if (kind, shape) != (other_kind, other_shape) and not (vector and other_vector and [] in (shape, other_shape)):
        return False
    return len(entries) == len(others) and _ordered(entries, others)
