"""Sets of real numbers: intervals, unions, inequalities and `x \\in S`, compared as sets.

A set becomes a sorted list of disjoint pieces with numeric ends; two sets are equal when their pieces are.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import mpmath

from gxpo_trainer.verify.evaluate import TooLarge, Undefined, symbols, value_at
from gxpo_trainer.verify.expression import Unsupported, parse_expression
from gxpo_trainer.verify.structure import Answer, Relation, Scalar, Sequence, Union, parse_answer

TOLERANCE = 1e-10
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
    if isinstance(answer, Union):
        return True
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
    if not sequence.opening and all(_is_set_like(item) for item in sequence.items):
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
    compact = re.sub(r"[\s{}]", "", text)
    if compact in ("\\mathbbR", "\\R", "\\Reals"):
        return [Piece(-infinity, infinity, False, False)]
    if compact == "\\emptyset":
        return []
    removed = re.fullmatch(r"\\mathbb\{R\}\s*(?:\\setminus|-|/)\s*(?P<set>\\\{.*\\\})", text.strip())
    if removed is None:
        return None
    points = _pieces(parse_answer(removed["set"]))
    if points is None:
        return None
    cuts = [-infinity, *sorted(point.low for point in points), infinity]
    return [Piece(low, high, False, False) for low, high in itertools.pairwise(cuts)]


def _relation_pieces(relation: Relation) -> list[Piece] | None:
    r"""x < 3, 3 > x, 1 \le x < 2, x \ne 3, x \in [0, 1]; the middle or the left side is the variable."""
    infinity = float("inf")
    sides, operators = relation.sides, relation.operators
    if operators == ("\\in",) and not _is_numeric(sides[0]):
        return _pieces(parse_answer(sides[1]))
    if len(operators) == 1 and operators[0] != "=":
        if _is_numeric(sides[0]) and not _is_numeric(sides[1]):
            flipped = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}.get(operators[0], "")
            sides, operators = (sides[1], sides[0]), (flipped,)
        end = _number(sides[1])
        within = re.fullmatch(r"\|([^|]*)\|", sides[0])
        if end is not None and end > 0 and within is not None and _variable(within[1]) is not None:
            return _absolute(operators[0], end)
        if end is None or _variable(sides[0]) is None:
            return None
        inclusive = operators[0] in ("\\le", "\\ge")
        if operators[0] in ("<", "\\le"):
            return [Piece(-infinity, end, False, inclusive)]
        if operators[0] in (">", "\\ge"):
            return [Piece(end, infinity, inclusive, False)]
        if operators[0] == "\\ne":
            return [Piece(-infinity, end, False, False), Piece(end, infinity, False, False)]
        return None
    return _double_inequality(sides, operators)


def _absolute(operator: str, end: float) -> list[Piece] | None:
    """|x| < end and |x| > end."""
    infinity, inclusive = float("inf"), operator in ("\\le", "\\ge")
    if operator in ("<", "\\le"):
        return [Piece(-end, end, inclusive, inclusive)]
    if operator in (">", "\\ge"):
        return [Piece(-infinity, -end, False, inclusive), Piece(end, infinity, inclusive, False)]
    return None


def _double_inequality(sides: tuple[str, ...], operators: tuple[str, ...]) -> list[Piece] | None:
    if len(operators) != 2 or _is_numeric(sides[1]):
        return None
    low, high = _number(sides[0]), _number(sides[2])
    if low is None or high is None:
        return None
    if set(operators) <= {"<", "\\le"}:
        return [Piece(low, high, operators[0] == "\\le", operators[1] == "\\le")]
    if set(operators) <= {">", "\\ge"}:
        return [Piece(high, low, operators[1] == "\\ge", operators[0] == "\\ge")]
    return None


def _variable(side: str) -> str | None:
    """A side that is one variable or f(x)."""
    return side if re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?\s*", side) else None


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
        value = value_at(node, mpmath.fp, 0, real=True)
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
