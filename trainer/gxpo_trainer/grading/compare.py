r"""Equality of structured answers. `answers_equal(gold, answer)` follows what the gold asks for.

Lists without brackets and sets are unordered, tuples and intervals ordered. A gold in parentheses accepts a bare
list in the same order. `x = 5` answers a gold of 5 and the other way round; names of several values are honoured
when both sides give them. Equations are equal up to a constant factor. Inequalities, `x \in S` and intervals are
compared as sets of reals.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import TypeGuard

from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.equality import constant_value, proportional
from gxpo_trainer.grading.expression import Node, parse_expression
from gxpo_trainer.grading.latex import Unsupported
from gxpo_trainer.grading.scalar import EXACT, has_letters, read, scalars_equal
from gxpo_trainer.grading.structure import Answer, Matrix, Relation, Scalar, Sequence, Union, parse_answer
from gxpo_trainer.grading.units import WORDS

MAX_MATCHED = 60


def answers_equal(gold: Answer, answer: Answer, tolerance: Fraction = EXACT) -> bool | None:
    """Whether the answer is the gold; None when that could not be decided. Raises TooLarge.

    tolerance: largest difference of each number; brackets, names and units must agree as without one.
    """
    if gold.text and gold.text == answer.text:
        return True
    if same_name(gold, answer):
        return answers_equal(_value(gold), _value(answer), tolerance)
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return scalars_equal(gold.text, answer.text, tolerance)
    a, b = as_intervals(gold), as_intervals(answer)
    names = _solved_for(gold), _solved_for(answer)
    if all(names) and names[0] != names[1] and not any("(" in name for name in names[0] | names[1]):
        a = None  # conditions on different letters
    if a is not None and b is not None and (a, b) != (gold, answer):
        return answers_equal(a, b, tolerance)
    if isinstance(gold, Sequence) and isinstance(answer, Sequence):
        return _sequences(gold, answer, tolerance)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return relations_equal(gold, answer)
    if isinstance(gold, Relation):
        value = value_of(gold) if is_assignment(gold) or gold.operators[0] == "\\approx" else None
        return value is not None and answers_equal(parse_answer(value), answer, tolerance)
    if isinstance(answer, Relation):
        value = value_of(answer)
        return value is not None and answers_equal(gold, parse_answer(value), tolerance)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _unordered(gold.items, answer.items, tolerance)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(gold, answer, tolerance)
    # One answer against several is equal only where the several are one.
    sides = [_flattened(side) if isinstance(side, Sequence) else (side,) for side in (gold, answer)]
    one = len(sides[0]) == len(sides[1]) == 1 and sides != [(gold,), (answer,)]
    return one and answers_equal(sides[0][0], sides[1][0], tolerance)


def _value(answer: Answer) -> Answer:
    """The value of an assignment; everything else as it is."""
    return parse_answer(value_of(answer) or "") if is_assignment(answer) else answer


def _sequences(gold: Sequence, answer: Sequence, tolerance: Fraction) -> bool | None:
    a, b = _flattened(gold), _flattened(answer)
    if len(a) != len(b) and _is_set(gold, a) and _is_set(answer, b):
        return max(len(a), len(b)) <= MAX_MATCHED and all(
            any(answers_equal(item, other) for other in others) for items, others in ((a, b), (b, a)) for item in items
        )
    if len(a) != len(b) or not _brackets_agree(gold, answer):
        return False
    if gold.opening in ("(", "[") or (answer.opening in ("(", "[")):
        return _ordered(map(_value, _by_coordinate(a)), map(_value, _by_coordinate(b)), tolerance)
    return _lists(a, b, tolerance)


def _by_coordinate(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Values of x, y and z in this order; other items as they are."""
    names = [assigned_name(item) or "" for item in items]
    return tuple(sorted(items, key=lambda item: assigned_name(item) or "")) if {*names} <= {*"xyz"} else items


def _is_set(sequence: Sequence, items: tuple[Answer, ...]) -> bool:
    """Braces, or a list of tuples (solutions), where a repetition adds nothing; a list of numbers counts."""
    solutions = all(isinstance(item, Sequence) and item.opening for item in items)
    return sequence.opening == "{" or (not sequence.opening and solutions)


def _brackets_agree(gold: Sequence, answer: Sequence) -> bool:
    """Two-element brackets may be intervals, where ( and [ differ; a set is never a tuple; bare goes with all."""
    if not gold.opening or not answer.opening:
        brackets = gold.opening + gold.closing + answer.opening + answer.closing
        return len(gold.items) != 2 or not {*"[]"} & {*brackets}
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


def _lists(gold: tuple[Answer, ...], answer: tuple[Answer, ...], tolerance: Fraction) -> bool | None:
    """Bare lists and sets: by names when both sides name all values, in the gold's order when only one side names
    different things or names come again (p = 1, q = 2, p = 3, q = 4), else in any order."""
    names = [tuple(assigned_name(item) for item in items) for items in (gold, answer)]
    named = [None not in side for side in names]
    # x_1 and x_2 are both x.
    different = [len({re.sub(r"_?[0-9]+$", "", name or "") for name in side}) > 1 for side in names]
    values = tuple(map(_value, gold)), tuple(map(_value, answer))
    if all(named) and len(set(names[0])) == len(names[0]) and set(names[0]) == set(names[1]):
        by_name = dict(zip(names[1], values[1], strict=True))
        return _ordered(values[0], (by_name[name] for name in names[0]), tolerance)
    if all(named) and any(different):
        return names[0] == names[1] and _ordered(*values, tolerance)
    if named[0] != named[1] and different[named.index(True)]:
        return _ordered(*values, tolerance)
    return _unordered(*values, tolerance)


def _ordered(gold: Iterable[Answer], answer: Iterable[Answer], tolerance: Fraction) -> bool | None:
    """Item by item: False when two differ, else None when a pair is undecided."""
    result: bool | None = True
    for a, b in zip(gold, answer, strict=True):
        verdict = answers_equal(a, b, tolerance)
        if verdict is False:
            return False
        result = result and verdict
    return result


def _unordered(gold: tuple[Answer, ...], answer: tuple[Answer, ...], tolerance: Fraction) -> bool | None:
    """Whether the items pair off. Taking the first match is enough: equality is an equivalence, and numbers within a
    tolerance are taken in ascending order."""
    if len(gold) != len(answer):
        return False
    if len(gold) > MAX_MATCHED:
        return _ordered(gold, answer, tolerance)
    left = sorted(answer, key=_size) if tolerance else list(answer)
    for item in sorted(gold, key=_size) if tolerance else gold:
        verdicts = [answers_equal(item, other, tolerance) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        left.pop(verdicts.index(True))
    return True


def _size(answer: Answer) -> Fraction:
    """The number that a scalar states, to sort by; 0 for all else."""
    node = read(answer.text).node if isinstance(answer, Scalar) else None
    return (node and constant_value(node)) or EXACT


def _matrices(gold: Answer, answer: Answer, tolerance: Fraction) -> bool | None:
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
    return len(entries) == len(others) and _ordered(entries, others, tolerance)


_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}\s*)|(?:\\?[A-Za-z]+(?:_\s*(?:\{[^{}]*\}|[0-9A-Za-z]))?'*\s*)+(?:\([^()=]*\))?|\|[^|]*\||\([A-Za-z\s,_0-9{}\\]*\)"
    r"|\\(?:bar|vec|hat|tilde|mathbf|mathbb|over\w+)\s*(?:\{[^{}]*\}|[A-Za-z])(?:_\{?\w\}?)?(?:[\[(][^\[\]()=]*[\])])?"
    r"|[A-Za-z]\[[^\[\]=]*\]|\\frac\{[A-Z]+\}\{[A-Z]+\}|\\angle.*|\\frac\{(?:d|\\partial)[^{}]*\}\{(?:d|\\partial)[^{}]*\}|[A-Za-z]\^\{-1\}\([a-z]\)"
)
_SUM_OF_NAMES = re.compile(r"[A-Za-z](?:_\{?\w\}?)?(?:\s*[+-]\s*[A-Za-z](?:_\{?\w\}?)?)+")
"""`a + b + c`, as in a question for the sum."""


def _looks_like_name(side: str) -> bool:
    """A name for a value: x, x_1, f(x), AB, |AB|, A:B, (p, q); not a sum, not a number."""
    parts = [part.strip() for part in re.split(r"[:/]", side)]
    return all(_NAME.fullmatch(part) is not None for part in parts) and not re.search(
        r"\\(?:frac\{[0-9]|sqrt|sin|cos|pi)", side
    )


def is_assignment(relation: Answer) -> TypeGuard[Relation]:
    r"""`name = value`, also as a chain `name = a = b`, or `name \in set`, or `name \approx value`."""
    if not isinstance(relation, Relation):
        return False
    first = relation.operators[0]
    if first not in ("=", "\\approx", "\\in") or any(op not in ("=", "\\approx") for op in relation.operators[1:]):
        return False
    return _looks_like_name(relation.sides[0])


def value_of(relation: Relation) -> str | None:
    r"""The value that a relation states: the last side of a chain of = whose first side is a name, or whose sides are
    all equal (`2^9 = 512`); what follows \approx is a remark unless nothing else was given. None for a condition on
    letters (`2x + z = 1`), and for inequalities."""
    if any(op not in ("=", "\\approx", "\\in", "\\equiv") for op in relation.operators):
        return None
    exact = [side for side, op in zip(relation.sides[1:], relation.operators, strict=True) if op != "\\approx"]
    if _looks_like_name(relation.sides[0]) or _SUM_OF_NAMES.fullmatch(relation.sides[0].strip()):
        return exact[-1] if exact else relation.sides[1]
    if not exact:
        return relation.sides[0]
    # A constant, or what is not understood (a sum with dots, a derivative), is the question; a side with letters that
    # is understood must be equal.
    derived = (not has_letters(side) or scalars_equal(side, exact[-1]) for side in (relation.sides[0], *exact[:-1]))
    return exact[-1] if all(derived) else None


def assigned_name(answer: Answer) -> str | None:
    """The name on the left of an assignment, without braces and blanks."""
    return re.sub(r"[\s{}]", "", answer.sides[0]) if is_assignment(answer) else None


def same_name(a: Answer, b: Answer) -> bool:
    """Whether both are assignments and about the same thing; y and f(x) both name a function's value."""
    names = [assigned_name(a), assigned_name(b)]
    if None in names or names[0] == names[1]:
        return None not in names
    functions = [re.fullmatch(r"[A-Za-z]\w*'*\(([a-z])\)", name or "") for name in names]
    if functions[0] is not None and functions[1] is not None:
        return functions[0][1] == functions[1][1]
    return "y" in names and any(functions)


def relations_equal(gold: Relation, answer: Relation) -> bool | None:
    """Two relations: equal side by side, perhaps read from the right, or their differences proportional."""
    flipped = tuple(_FLIPPED.get(operator, operator) for operator in answer.operators[::-1])
    for operators, sides in ((answer.operators, answer.sides), (flipped, answer.sides[::-1])):
        if operators == gold.operators and all(map(scalars_equal, gold.sides, sides)):
            return True
    if len(gold.operators) == len(answer.operators) > 1:
        return False
    op, other = gold.operators[0], answer.operators[0]
    pairs = []
    # Not of chains, and of what the grammar does not know.
    with contextlib.suppress(Unsupported):
        pairs = [[parse_expression(side) for side in relation.sides] for relation in (gold, answer)]
    if not all(len(pair) == 2 for pair in pairs) or not pairs or op not in _FLIPPED or other not in _FLIPPED:
        return engine_equal(gold.text, answer.text)
    factor_sign = proportional(*(Node("add", (left, Node("neg", (right,)))) for left, right in pairs))
    return factor_sign != 0 and other == (op if factor_sign > 0 else _FLIPPED[op])


_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?")
_LOW, _HIGH = "-\\infty", "\\infty"


def as_intervals(answer: Answer) -> Answer | None:
    r"""The intervals that answers mean which are solved for one name: x < 3, 1 \le x < 2, x \ne 3, x < 1 or x > 2,
    x \in S, all real numbers; intervals and sets as they are. None for all else."""
    if isinstance(answer, Scalar):
        words = read(answer.text).words
        if words in WORDS["phrases"]["everything"]:
            return parse_answer(f"({_LOW}, {_HIGH})")
        return Sequence("", (), "{", "}") if words in WORDS["phrases"]["nothing"] else None
    if isinstance(answer, Relation):
        return _solved(answer)
    if isinstance(answer, Matrix):
        return None
    if isinstance(answer, Sequence) and answer.opening:
        return answer
    parts = [as_intervals(item) for item in answer.items]
    relations = all(isinstance(item, Relation) for item in answer.items)
    if None in parts or len(_solved_for(answer)) > 1 or (isinstance(answer, Sequence) and not relations):
        return None
    nested = (part.items if isinstance(part, Union) else (part,) for part in parts if part is not None)
    return Union("", tuple(itertools.chain.from_iterable(nested)))


def _solved_for(answer: Answer) -> set[str]:
    """The names that are sides of the relations of an answer."""
    items = answer.items if isinstance(answer, Sequence | Union) else (answer,)
    return {side for item in items if isinstance(item, Relation) for side in item.sides if _is_name(side)}


def _solved(relation: Relation) -> Answer | None:
    """The interval of one inequality, from its lower to its upper end."""
    sides, operators = relation.sides, relation.operators
    if operators == ("\\in",):
        return as_intervals(parse_answer(sides[1]))
    if {*operators} <= {">", "\\ge"} or (operators == ("\\ne",) and _is_name(sides[1])):
        sides, operators = sides[::-1], tuple(_FLIPPED[operator] for operator in operators[::-1])
    if operators == ("\\ne",):
        holes = parse_answer(f"({_LOW}, {sides[1]}) \\cup ({sides[1]}, {_HIGH})")
        return holes if _is_name(sides[0]) and _is_constant(sides[1]) else None
    if len(sides) == 2 and _is_name(sides[0]):
        sides, operators = (_LOW, *sides), ("<", *operators)
    elif len(sides) == 2:
        sides, operators = (*sides, _HIGH), (*operators, "<")
    if len(sides) != 3 or not {*operators} <= {"<", "\\le"} or not _is_name(sides[1]):
        return None
    if not (_is_constant(sides[0]) and _is_constant(sides[2])):
        return None
    opening, closing = ("[" if operators[0] == "\\le" else "("), ("]" if operators[1] == "\\le" else ")")
    return parse_answer(f"{opening}{sides[0]}, {sides[2]}{closing}")


def _is_name(side: str) -> bool:
    return _VARIABLE.fullmatch(side) is not None and not _is_constant(side)


def _is_constant(side: str) -> bool:
    return "\\infty" in side or (read(side).node is not None and not has_letters(side))
