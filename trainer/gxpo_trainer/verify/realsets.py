"""Sets of real numbers: intervals, unions, inequalities and `x \\in S`, compared as sets.

A set becomes a sorted list of disjoint pieces with numeric ends; two sets are equal when their pieces are.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import mpmath

from gxpo_trainer.verify.evaluate import Undefined, no_symbols, substituted, symbols, value_at
from gxpo_trainer.verify.expression import Node, number, parse_expression
from gxpo_trainer.verify.scalar import read
from gxpo_trainer.verify.structure import Answer, Relation, Scalar, Sequence, Union, parse_answer
from gxpo_trainer.verify.tokens import TooLarge, Unsupported
from gxpo_trainer.verify.words import load

TOLERANCE = 1e-10
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?")
_INFINITE = re.compile(r"([+-]?)\s*\\infty\s*")


@dataclass(frozen=True, slots=True)
class Piece:
    """From low to high; `low_in`/`high_in`: the end belongs to the set."""

    low: float
    high: float
    low_in: bool
    high_in: bool


def real_sets_equal(gold: Answer, answer: Answer) -> bool | None:
    """Whether both are sets of reals and equal; None when either is not (or both are plain tuples)."""
    if not (_is_set_like(gold) or _is_set_like(answer)):
        return None
    a, b = pieces_of(gold), pieces_of(answer)
    if a is None or b is None:
        return None
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _is_set_like(answer: Answer) -> bool:
    """Something that can only mean a set of reals, not a tuple or a list of numbers."""
    if isinstance(answer, Relation):
        return any(op != "=" and op != "\\approx" for op in answer.operators)
    if isinstance(answer, Union) or (isinstance(answer, Sequence) and answer.opening == "{" and not answer.items):
        return True
    if isinstance(answer, Scalar):
        return _named_set(answer.text) is not None
    if isinstance(answer, Sequence) and not answer.opening:
        return any(_is_set_like(item) for item in answer.items)
    return isinstance(answer, Sequence) and (answer.opening == "[") != (answer.closing == "]")


def _same(a: Piece, b: Piece) -> bool:
    return a.low_in == b.low_in and a.high_in == b.high_in and _close(a.low, b.low) and _close(a.high, b.high)


def _close(a: float, b: float) -> bool:
    if math.isinf(a) or math.isinf(b):
        return a == b
    return abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))


def pieces_of(answer: Answer) -> list[Piece] | None:
    """Disjoint pieces, sorted; None when the answer is not a set of reals with numeric ends."""
    found = _pieces(answer)
    return None if found is None else _merged(found)


def _pieces(answer: Answer) -> list[Piece] | None:
    if isinstance(answer, Union):
        return _together(answer.items)
    if isinstance(answer, Sequence):
        return _sequence_pieces(answer)
    if isinstance(answer, Relation):
        return _relation_pieces(answer)
    if isinstance(answer, Scalar):
        return _named_set(answer.text)
    return None


def _together(items: tuple[Answer, ...]) -> list[Piece] | None:
    pieces: list[Piece] = []
    for item in items:
        found = _pieces(item)
        if found is None:
            return None
        pieces.extend(found)
    return pieces


def _sequence_pieces(sequence: Sequence) -> list[Piece] | None:
    if not sequence.opening and all(isinstance(item, Relation) or _is_set_like(item) for item in sequence.items):
        return _together(sequence.items)
    ends = [_number(item.text) for item in sequence.items]
    if any(end is None for end in ends):
        return None
    values = [end for end in ends if end is not None]
    if sequence.opening in ("{", ""):
        return [Piece(value, value, True, True) for value in values]
    if len(values) != 2 or values[0] > values[1]:
        return None
    return [Piece(values[0], values[1], sequence.opening == "[", sequence.closing == "]")]


def _named_set(text: str) -> list[Piece] | None:
    infinity = float("inf")
    words = read(text).words if "{" in text or text.isascii() else None
    if words is not None:
        if words in load()["phrases"]["everything"]:
            return [Piece(-infinity, infinity, False, False)]
        return [] if words in load()["phrases"]["nothing"] else None
    removed = re.fullmatch(r"\\mathbb\{R\}\s*(?:\\setminus|-|/)\s*(?P<set>\\\{.*\\\})", text.strip())
    if removed is None:
        return None
    points = _pieces(parse_answer(removed["set"]))
    if points is None:
        return None
    cuts = [-infinity, *sorted(point.low for point in points), infinity]
    return [Piece(low, high, False, False) for low, high in itertools.pairwise(cuts)]


def _relation_pieces(relation: Relation) -> list[Piece] | None:
    r"""x < 3, 3 > 2x, 1 \le x < 2, x \ne 3, |x - 1| < 2, x \in [0, 1]: one side is linear in a variable."""
    sides, operators = relation.sides, relation.operators
    if operators == ("\\in",) and not _is_numeric(sides[0]):
        return _pieces(parse_answer(sides[1]))
    if len(operators) != 1:
        return _double_inequality(sides, operators)
    operator = operators[0]
    if _is_numeric(sides[0]):
        sides, operator = sides[::-1], _FLIPPED.get(operator, "")
    end = _number(sides[1])
    if end is None:
        return None
    absolute = re.fullmatch(r"\|([^|]*)\|", sides[0].strip())
    if absolute is None:
        line = _linear(sides[0])
        return None if line is None else _solved(line, operator, end)
    line = _linear(absolute[1])
    if line is None or end < 0:
        return None
    if operator in ("<", "\\le"):
        return _double(line, -end, end, operator == "\\le", operator == "\\le")
    upper, lower = _solved(line, operator, end), _solved(line, _FLIPPED.get(operator, ""), -end)
    return None if upper is None or lower is None else upper + lower


def _solved(line: tuple[float, float], operator: str, end: float) -> list[Piece] | None:
    """The x with slope·x + intercept `operator` end."""
    infinity = float("inf")
    slope, intercept = line
    at = (end - intercept) / slope
    if slope < 0:
        operator = _FLIPPED.get(operator, "")
    if operator in ("<", "\\le"):
        return [Piece(-infinity, at, False, operator == "\\le")]
    if operator in (">", "\\ge"):
        return [Piece(at, infinity, operator == "\\ge", False)]
    if operator == "=":
        return [Piece(at, at, True, True)]
    if operator == "\\ne":
        return [Piece(-infinity, at, False, False), Piece(at, infinity, False, False)]
    return None


def _double(line: tuple[float, float], low: float, high: float, low_in: bool, high_in: bool) -> list[Piece]:
    """The x with low < slope·x + intercept < high."""
    ends = [((end - line[1]) / line[0], inside) for end, inside in ((low, low_in), (high, high_in))]
    (low, low_in), (high, high_in) = ends if line[0] > 0 else ends[::-1]
    return [Piece(low, high, low_in, high_in)]


def _linear(side: str) -> tuple[float, float] | None:
    """(slope, intercept) of a side that is linear in its one variable, or one name such as f(x)."""
    if _NAME.fullmatch(side.strip()):
        return 1.0, 0.0
    try:
        node = parse_expression(side)
        if len(symbols(node)) != 1 or any(part.endswith("()") for part in symbols(node)):
            return None
        at = [float(value_at(_at(node, x), mpmath.fp, no_symbols, real=True)) for x in (0, 1, 3, 8)]
    except (Unsupported, Undefined, TooLarge, TypeError):
        return None
    slope = at[1] - at[0]
    straight = all(_close(value, at[0] + slope * x) for value, x in zip(at[2:], (3, 8), strict=True))
    return (slope, at[0]) if slope and straight else None


def _at(node: Node, x: int) -> Node:
    """The expression with its variable replaced by a number."""
    return substituted(node, {name: number(x) for name in symbols(node)})


def _double_inequality(sides: tuple[str, ...], operators: tuple[str, ...]) -> list[Piece] | None:
    if len(operators) != 2 or _is_numeric(sides[1]):
        return None
    low, high = _number(sides[0]), _number(sides[2])
    if low is None or high is None:
        return None
    line = _linear(sides[1])
    if line is None:
        return None
    if set(operators) <= {"<", "\\le"}:
        return _double(line, low, high, operators[0] == "\\le", operators[1] == "\\le")
    if set(operators) <= {">", "\\ge"}:
        return _double(line, high, low, operators[1] == "\\ge", operators[0] == "\\ge")
    return None


def _is_numeric(side: str) -> bool:
    return _number(side) is not None


def _number(text: str) -> float | None:
    r"""Value of a constant in double precision, \pm\infty included; None for everything else."""
    infinite = _INFINITE.fullmatch(text.strip())
    if infinite is not None:
        return float("-inf") if infinite[1] == "-" else float("inf")
    try:
        node = parse_expression(text)
        if symbols(node):
            return None
        value = value_at(node, mpmath.fp, no_symbols, real=True)
    except (Unsupported, Undefined, TooLarge):
        return None
    return float(value) if isinstance(value, (int, float)) else None


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Sorted, with overlapping and touching pieces joined, empty ones dropped."""
    kept = [
        piece
        for piece in pieces
        if piece.low < piece.high or (piece.low == piece.high and piece.low_in and piece.high_in)
    ]
    kept.sort(key=lambda piece: (piece.low, not piece.low_in))
    merged: list[Piece] = []
    for piece in kept:
        last = merged[-1] if merged else None
        touching = last is not None and (
            piece.low < last.high or (_close(piece.low, last.high) and (piece.low_in or last.high_in))
        )
        if last is None or not touching:
            merged.append(piece)
        elif piece.high > last.high or (_close(piece.high, last.high) and piece.high_in and not last.high_in):
            merged[-1] = Piece(last.low, piece.high, last.low_in, piece.high_in)
    return merged
