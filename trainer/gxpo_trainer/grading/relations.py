r"""Equations and inequalities: assignments (`x = 5`, `f(x) = 2x`), relations up to a constant factor, sets of reals.

Intervals, unions, inequalities and `x \in S` are compared as sets. A set is its membership test and the points where
membership may change. Two sets are equal when they agree at all those points, between them and beyond them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import mpmath

from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.equality import Undefined, no_symbols, proportional, subtrees, symbols, value_at
from gxpo_trainer.grading.expression import Node, parse_expression
from gxpo_trainer.grading.latex import TooLarge, Unsupported
from gxpo_trainer.grading.scalar import has_letters, read, scalars_equal
from gxpo_trainer.grading.structure import Answer, Matrix, Relation, Scalar, Sequence, Union, parse_answer
from gxpo_trainer.grading.units import WORDS

_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}\s*)|(?:\\?[A-Za-z]+(?:_\s*(?:\{[^{}]*\}|[0-9A-Za-z]))?'*\s*)+(?:\([^()=]*\))?|\|[^|]*\||\([A-Za-z\s,_0-9{}\\]*\)"
    r"|\\frac\{[A-Z]+\}\{[A-Z]+\}|\\angle.*|\\frac\{(?:d|\\partial)[^{}]*\}\{(?:d|\\partial)[^{}]*\}|[A-Za-z]\^\{-1\}\([a-z]\)"
)
_SUM_OF_NAMES = re.compile(r"[A-Za-z](?:_\{?\w\}?)?(?:\s*[+-]\s*[A-Za-z](?:_\{?\w\}?)?)+")
"""`a + b + c`, as in a question for the sum."""


def _looks_like_name(side: str) -> bool:
    """A name for a value: x, x_1, f(x), AB, |AB|, A:B, (p, q); not a sum, not a number."""
    parts = [part.strip() for part in re.split(r"[:/]", side)]
    return all(_NAME.fullmatch(part) is not None for part in parts) and not re.search(
        r"\\(?:frac\{[0-9]|sqrt|sin|cos|pi)", side
    )


def is_assignment(relation: Answer) -> bool:
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
    if not isinstance(answer, Relation) or not is_assignment(answer):
        return None
    return re.sub(r"[\s{}]", "", answer.sides[0])


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
    a, b = _difference(gold), _difference(answer)
    op, other = gold.operators[0], answer.operators[0]
    if a is None or b is None or op not in _FLIPPED or other not in _FLIPPED:
        return engine_equal(gold.text, answer.text)
    factor_sign = proportional(a, b)
    return factor_sign != 0 and other == (op if factor_sign > 0 else _FLIPPED[op])


def _difference(relation: Relation) -> Node | None:
    """Left side minus right side; None for chains and for what the grammar does not know."""
    try:
        left, right = (parse_expression(side) for side in relation.sides)
    except (Unsupported, ValueError):
        return None
    return Node("add", (left, Node("neg", (right,))))


TOLERANCE = 1e-10
MAX_ENDS = 100
_HOLDS = {"<": (-1,), ">": (1,), "\\le": (-1, 0), "\\ge": (1, 0), "\\ne": (-1, 1), "=": (0,)}
"""Which orders of its sides a relation allows."""
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?")
_INFINITE = re.compile(r"([+-]?)\s*\\infty\s*")
_SAMPLES = (0.0, 1.0, 2.718, 8.141)


@dataclass(frozen=True, slots=True)
class RealSet:
    """`ends`: the finite points where membership may change. `variable`: the name that inequalities restrict."""

    ends: tuple[float, ...]
    contains: Callable[[float], bool]
    variable: str = ""


def real_sets_equal(gold: Answer, answer: Answer) -> bool | None:
    """Whether both are sets of reals and equal; None when either is not (or both are plain tuples). Raises TooLarge."""
    if not (_is_set_like(gold) or _is_set_like(answer)):
        return None
    a, b = _real_set(gold), _real_set(answer)
    if a is None or b is None:
        return None
    return all(a.contains(x) == b.contains(x) for x in _probes(a.ends + b.ends))


def _probes(ends: tuple[float, ...]) -> list[float]:
    """The ends, points between them, and points beyond them."""
    distinct: list[float] = []
    for end in sorted(ends):
        if not distinct or _order(distinct[-1], end):
            distinct.append(end)
    between = [(low + high) / 2 for low, high in itertools.pairwise(distinct)]
    beyond = [sign * (1 + 2 * max(map(abs, distinct), default=0.0)) for sign in (-1, 1)]
    return distinct + between + beyond


def _order(a: float, b: float) -> int:
    """-1, 0 or 1: a is less than, equal to (but for rounding), greater than b."""
    if a == b or (math.isfinite(a - b) and abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))):
        return 0
    return -1 if a < b else 1


def _is_set_like(answer: Answer) -> bool:
    """Something that can only mean a set of reals, not a tuple or a list of numbers."""
    if isinstance(answer, Relation):
        return any(op != "=" and op != "\\approx" for op in answer.operators)
    if isinstance(answer, Scalar):
        return _named_set(answer.text) is not None
    if isinstance(answer, Sequence) and not answer.opening:
        return any(_is_set_like(item) for item in answer.items)
    if isinstance(answer, Sequence):
        return not answer.items or (answer.opening == "[") != (answer.closing == "]")
    return isinstance(answer, Union)


def _real_set(answer: Answer) -> RealSet | None:
    """None when the answer is not a set of reals with numeric ends."""
    if isinstance(answer, Scalar):
        return _named_set(answer.text)
    if isinstance(answer, Relation):
        return _relation_set(answer)
    if isinstance(answer, Matrix):
        return None
    if isinstance(answer, Union) or (
        not answer.opening and all(isinstance(item, Relation) or _is_set_like(item) for item in answer.items)
    ):
        sets = [part for item in answer.items if (part := _real_set(item)) is not None]
        if len(sets) != len(answer.items) or len({part.variable for part in sets if part.variable}) > 1:
            return None
    else:
        values = [value for item in answer.items if (value := _number(item.text)) is not None]
        if len(values) != len(answer.items):
            return None
        if answer.opening in ("(", "["):
            if len(values) != 2 or values[0] > values[1]:
                return None
            return _interval(values[0], values[1], answer.opening == "[", answer.closing == "]")
        sets = [_interval(value, value, True, True) for value in values]
    return RealSet(tuple(end for part in sets for end in part.ends), lambda x: any(part.contains(x) for part in sets))


def _interval(low: float, high: float, low_in: bool, high_in: bool) -> RealSet:
    ends = tuple(end for end in (low, high) if math.isfinite(end))
    return RealSet(ends, lambda x: _order(low, x) < low_in and _order(x, high) < high_in)


def _named_set(text: str) -> RealSet | None:
    words = read(text).words
    if words is not None:
        everything, nothing = (words in WORDS["phrases"][kind] for kind in ("everything", "nothing"))
        return RealSet((), lambda x: everything) if everything or nothing else None
    removed = re.fullmatch(r"\\mathbb\{R\}\s*(?:\\setminus|-|/)\s*(?P<set>\\\{.*\\\})", text.strip())
    points = None if removed is None else _real_set(parse_answer(removed["set"]))
    return None if points is None else RealSet(points.ends, lambda x: not points.contains(x))


def _relation_set(relation: Relation) -> RealSet | None:
    r"""x < 3, 3 > 2x, 1 \le x < 2, x \ne 3, |x - 1| < 2, x \in [0, 1]: sides are piecewise linear in one variable."""
    if relation.operators == ("\\in",) and _number(relation.sides[0]) is None:
        return _real_set(parse_answer(relation.sides[1]))
    if any(operator not in _HOLDS for operator in relation.operators):
        return None
    try:
        sides = [_function(side) for side in relation.sides]
        variables = set[str]().union(*(symbols(node) for node in sides if isinstance(node, Node)))
        if len(variables) != 1 or any(name.endswith("()") for name in variables):
            return None
        ends = [end for pair in itertools.pairwise(sides) for end in _roots(*pair)]
    except (Unsupported, Undefined, TooLarge, TypeError):
        return None
    steps = list(zip(itertools.pairwise(sides), relation.operators, strict=True))
    return RealSet(
        tuple(ends),
        lambda x: all(_order(_at(a, x), _at(b, x)) in _HOLDS[operator] for (a, b), operator in steps),
        *variables,
    )


def _function(side: str) -> Node | float:
    """A side as a number, or as an expression in its variable; one name such as f(x) is a variable."""
    value = _number(side)
    if value is not None:
        return value
    name = side.strip()
    return Node("sym", name=name) if _VARIABLE.fullmatch(name) else parse_expression(side)


def _at(side: Node | float, x: float) -> float:
    if not isinstance(side, Node):
        return side
    return float(value_at(side, mpmath.fp, lambda name: Fraction(x), real=True))


def _roots(a: Node | float, b: Node | float) -> list[float]:
    """Where two piecewise linear sides are equal, and where one of their pieces ends. Raises Unsupported for others."""
    sides = [side for side in (a, b) if isinstance(side, Node) or math.isfinite(side)]
    nodes = [part for side in sides if isinstance(side, Node) for part in subtrees(side)]
    # Inner absolute values first, which stand behind the ones around them. An infinite side is never reached.
    inner = [(part.args[0], 0.0) for part in reversed(nodes) if part.kind == "call" and part.name == "abs"]
    roots: list[float] = []
    for left, right in inner + ([(a, b)] if len(sides) == 2 else []):
        for low, high in itertools.pairwise([-math.inf, *sorted(roots), math.inf]):
            start = low if math.isfinite(low) else high if math.isfinite(high) else 0.0
            step = (high - low) / _SAMPLES[-1] if math.isfinite(high - low) else 1.0 if high == math.inf else -1.0
            first, *others = (_at(left, start + step * at) - _at(right, start + step * at) for at in _SAMPLES)
            slope = others[0] - first
            if any(_order(first + slope * at, other) for at, other in zip(_SAMPLES[1:], others, strict=True)):
                raise Unsupported("not piecewise linear")
            if slope and low <= start - step * first / slope <= high:
                roots.append(start - step * first / slope)
        if len(roots) > MAX_ENDS:
            raise Unsupported("too many pieces")
    return roots


def _number(text: str) -> float | None:
    r"""Value of a constant in double precision, \pm\infty included; None for everything else."""
    infinite = _INFINITE.fullmatch(text.strip())
    if infinite is not None:
        return -math.inf if infinite[1] == "-" else math.inf
    try:
        node = parse_expression(text)
        value = None if symbols(node) else value_at(node, mpmath.fp, no_symbols, real=True)
    except (Unsupported, Undefined, TooLarge):
        return None
    return float(value) if isinstance(value, (int, float)) else None
