"""Equality of structured answers. `answers_equal(gold, answer)` follows what the gold asks for.

Lists without brackets and sets are unordered, tuples and intervals ordered. A gold in parentheses accepts a bare
list in the same order. `x = 5` answers a gold of 5 and the other way round; names of several values are honoured
when both sides give them. Inequalities, `x \\in S` and intervals are compared as sets of reals.
"""

from __future__ import annotations

import re

from gxpo_trainer.verify.engine import engine_equal
from gxpo_trainer.verify.realsets import real_sets_equal
from gxpo_trainer.verify.relations import (
    assigned_name,
    first_name,
    is_assignment,
    relations_equal,
    same_name,
    value_of,
)
from gxpo_trainer.verify.scalar import scalars_equal, understood
from gxpo_trainer.verify.structure import Answer, Matrix, Relation, Scalar, Sequence, Union, parse_answer

MAX_MATCHED = 60
_UNIT_VECTOR = re.compile(r"\\vec\s*\{([ijk])\}")
_BARE_UNIT_VECTOR = re.compile(r"(?<![A-Za-z\\])([ijk])(?![A-Za-z])")


def answers_equal(gold: Answer, answer: Answer) -> bool | None:
    """Whether the answer is the gold; None when that could not be decided. Raises TooLarge."""
    if gold.text and gold.text == answer.text:
        return True
    if "\\vec" in gold.text or "\\vec" in answer.text:
        gold, answer = _as_vectors(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _with_relations(gold, answer)
    if isinstance(gold, Union) or isinstance(answer, Union):
        return _unions(gold, answer)
    if isinstance(gold, Sequence) and isinstance(answer, Sequence):
        return _sequences(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(gold, answer)
    if isinstance(gold, Sequence) or isinstance(answer, Sequence):
        return _sequence_and_scalar(gold, answer)
    as_sets = real_sets_equal(gold, answer)
    return scalars_equal(gold.text, answer.text) if as_sets is None else as_sets


def _as_vectors(gold: Answer, answer: Answer) -> tuple[Answer, Answer]:
    r"""Both sides with \vec{i}, \vec{j}, \vec{k} as unit vectors, as components where the other side has components."""
    sizes = [_num_components(side) for side in (gold, answer)]
    sides = []
    for side, size in ((gold, sizes[1]), (answer, sizes[0])):
        if isinstance(side, Scalar):
            text = side.text
            text = text if _UNIT_VECTOR.search(text) else _BARE_UNIT_VECTOR.sub(r"\\vec{\1}", text)
            side = parse_answer(text) if size is None else _components(text, size)
        sides.append(side)
    return sides[0], sides[1]


def _num_components(answer: Answer) -> int | None:
    if isinstance(answer, Matrix) and 1 in (len(answer.rows), len(answer.rows[0])):
        return max(len(answer.rows), len(answer.rows[0]))
    return len(answer.items) if isinstance(answer, Sequence) and answer.opening in ("(", "[") else None


def _components(text: str, size: int) -> Answer:
    """The coefficients of i, j, k: the value with one of them 1 and the others 0."""
    # In turn, one of them is marked by "1" and the others become 0.
    coefficients = [_UNIT_VECTOR.sub("(0)", text.replace(f"\\vec{{{unit}}}", "(1)")) for unit in "ijk"]
    beyond = coefficients[size:]
    if any(scalars_equal("0", text) is not True for text in beyond):
        return Scalar(text)
    return Sequence(text, tuple(Scalar(text) for text in coefficients[:size]), "(", ")")


def _with_relations(gold: Answer, answer: Answer) -> bool | None:
    """At least one side is a relation: values of assignments, then sets of reals, then the relations themselves."""
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if is_assignment(gold) and is_assignment(answer):
            if not same_name(gold, answer):
                return relations_equal(gold, answer)
            return answers_equal(_value(gold), _value(answer))
        as_sets = real_sets_equal(gold, answer)
        return relations_equal(gold, answer) if as_sets is None else as_sets
    as_sets = real_sets_equal(gold, answer)
    if as_sets is not None:
        return as_sets
    if isinstance(gold, Relation):
        if isinstance(answer, Sequence) and not is_assignment(gold):
            return _different_kinds(gold, answer)
        remark = gold.operators[0] == "\\approx"
        return answers_equal(_value(gold), answer) if is_assignment(gold) or remark else False
    assert isinstance(answer, Relation)
    value = value_of(answer)
    return False if value is None else answers_equal(gold, parse_answer(value))


def _value(relation: Relation) -> Answer:
    value = value_of(relation)
    return Scalar(relation.text) if value is None else parse_answer(value)


def _unions(gold: Answer, answer: Answer) -> bool | None:
    as_sets = real_sets_equal(gold, answer)
    if as_sets is not None:
        return as_sets
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _unordered(gold.items, answer.items)
    return _different_kinds(gold, answer)


def _sequences(gold: Sequence, answer: Sequence) -> bool | None:
    a, b = _flattened(gold), _flattened(answer)
    if len(a) != len(b) and _is_set(gold, a) and _is_set(answer, b):
        a, b = _distinct(a), _distinct(b)
    if len(a) != len(b):
        as_sets = real_sets_equal(gold, answer)
        return False if as_sets is None else as_sets
    if not _brackets_agree(gold, answer):
        return False
    if gold.opening in ("(", "[") or (answer.opening in ("(", "[")):
        return _ordered(_values(a), _values(b))
    return _lists(a, b)


def _is_set(sequence: Sequence, items: tuple[Answer, ...]) -> bool:
    """Braces, or a list of tuples (solutions), where saying one twice adds nothing; a list of numbers counts."""
    solutions = all(isinstance(item, Sequence) and item.opening for item in items)
    return sequence.opening == "{" or (not sequence.opening and solutions)


def _brackets_agree(gold: Sequence, answer: Sequence) -> bool:
    """Two-element brackets may be intervals, where ( and [ differ; a set is never a tuple; bare goes with all."""
    if not gold.opening or not answer.opening:
        return gold.opening != "[" and answer.opening != "[" if len(gold.items) == 2 else True
    if "{" in (gold.opening, answer.opening):
        return gold.opening == answer.opening
    if len(gold.items) != 2:
        return True
    return (gold.opening, gold.closing) == (answer.opening, answer.closing)


def _flattened(sequence: Sequence) -> tuple[Answer, ...]:
    r"""Items with bare inner lists (of \pm) opened up; groups of named values (p=5,q=2; ...) become tuples."""
    items: list[Answer] = []
    for item in sequence.items:
        if isinstance(item, Sequence) and not item.opening:
            if ";" in sequence.text and len(item.items) > 1 and "\\pm" not in item.text:
                items.append(Sequence(item.text, _values(item.items), "(", ")"))
            else:
                items.extend(_flattened(item))
        elif isinstance(item, Relation) and is_assignment(item):
            value = _value(item)
            pm = isinstance(value, Sequence) and not value.opening and "\\pm" in item.text
            items.extend(value.items if pm and isinstance(value, Sequence) else (item,))
        else:
            items.append(item)
    return _solutions(tuple(items))


def _solutions(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """`p = 5, q = 2, p = 7, q = 2` are two solutions (5, 2) and (7, 2): a name that comes again begins the next."""
    names = [assigned_name(item) for item in items]
    if None in names or names.count(names[0]) < 2 or len(set(names)) == 1:
        return items
    period = names.index(names[0], 1)
    if len(names) % period or any(name != names[at % period] for at, name in enumerate(names)):
        return items
    groups = (items[at : at + period] for at in range(0, len(items), period))
    return tuple(Sequence("", _values(group), "(", ")") for group in groups)


def _values(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(_value(item) if isinstance(item, Relation) and is_assignment(item) else item for item in items)


def _distinct(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Items of a set, each once."""
    kept: list[Answer] = []
    for item in items[:MAX_MATCHED]:
        if not any(answers_equal(item, other) for other in kept):
            kept.append(item)
    return tuple(kept) + items[MAX_MATCHED:]


def _lists(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    """Bare lists and sets: by names when both sides name all values, in the gold's order when only one side names
    different things, else in any order."""
    names = [tuple(assigned_name(item) for item in items) for items in (gold, answer)]
    named = [None not in side and len(set(side)) == len(side) for side in names]
    values = _values(gold), _values(answer)
    if named[0] and named[1] and set(names[0]) == set(names[1]):
        by_name = dict(zip(names[1], values[1], strict=True))
        return _all(answers_equal(value, by_name[name]) for name, value in zip(names[0], values[0], strict=True))
    if named[0] and named[1] and any(len({first_name(name) for name in side}) > 1 for side in names):
        return False
    if (named[0] != named[1]) and len({first_name(name) for name in names[0 if named[0] else 1]}) > 1:
        return _ordered(*values)
    return _unordered(*values)


def _all(verdicts: object) -> bool | None:
    result: bool | None = True
    for verdict in verdicts:  # type: ignore[attr-defined]
        if verdict is False:
            return False
        if verdict is None:
            result = None
    return result


def _ordered(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    return _all(answers_equal(a, b) for a, b in zip(gold, answer, strict=True))


def _unordered(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    """Whether the items pair off (equality is an equivalence, so taking the first match is enough)."""
    if len(gold) != len(answer):
        return False
    if len(gold) > MAX_MATCHED:
        return _ordered(gold, answer)
    left = list(answer)
    result: bool | None = True
    for item in gold:
        verdicts = [answers_equal(item, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            left.pop(verdicts.index(None))
            result = None
        else:
            return False
    return result


def _matrices(gold: Answer, answer: Answer) -> bool | None:
    r"""Entry by entry; a row or column vector equals the tuple of its entries."""
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if gold.kind != answer.kind or [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        pairs = (pair for a, b in zip(gold.rows, answer.rows, strict=True) for pair in zip(a, b, strict=True))
        return _all(answers_equal(a, b) for a, b in pairs)
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    if matrix.kind:
        return engine_equal(gold.text, answer.text)
    entries = tuple(entry for row in matrix.rows for entry in row)
    if isinstance(other, Sequence) and other.opening in ("(", "[") and 1 in (len(matrix.rows), len(matrix.rows[0])):
        if len(entries) != len(other.items):
            return False
        return _ordered(entries, other.items) if matrix is gold else _ordered(other.items, entries)
    return _different_kinds(gold, answer)


def _sequence_and_scalar(gold: Answer, answer: Answer) -> bool | None:
    """One side has several answers: equal only when they are all the same one, or by the engine's reading."""
    as_sets = real_sets_equal(gold, answer)
    if as_sets is not None:
        return as_sets
    sequence, other = (gold, answer) if isinstance(gold, Sequence) else (answer, gold)
    assert isinstance(sequence, Sequence)
    items = _flattened(sequence)
    if len(items) == 1:
        return answers_equal(items[0], other)
    return _different_kinds(gold, answer)


def _different_kinds(gold: Answer, answer: Answer) -> bool | None:
    """Answers of different shapes are different when both are understood; else math-verify may know better."""
    if _all_understood(gold) and _all_understood(answer):
        return False
    return engine_equal(gold.text, answer.text)


def _all_understood(answer: Answer) -> bool:
    if isinstance(answer, Scalar):
        return understood(answer.text)
    if isinstance(answer, Relation):
        return all(understood(side) for side in answer.sides)
    items = [cell for row in answer.rows for cell in row] if isinstance(answer, Matrix) else answer.items
    return all(_all_understood(item) for item in items)
