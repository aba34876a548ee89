"""The shape of an answer: scalar, list, tuple, interval, set, union, relation, matrix.

`parse_answer` takes a normalised answer and splits it at the outermost level, again and again, until scalars are
left. It does not look into scalars; `scalar.py` does.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

MAX_PARTS = 200
MAX_NESTING = 12

RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\equiv", "\\subset")


@dataclass(frozen=True, slots=True)
class Scalar:
    """Anything without outer structure: a number, an expression, a word."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several answers. opening/closing: "" for a bare list, "(" "[" for tuples and intervals, "{" for a set."""

    text: str
    items: tuple[Answer, ...]
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """`sides[0] operators[0] sides[1] operators[1] ...`."""

    text: str
    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Union:
    r"""Sets joined by \cup."""

    text: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries."""

    text: str
    rows: tuple[tuple[Answer, ...], ...]


Answer = Scalar | Sequence | Relation | Union | Matrix

_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\{([bpvVBs]?(?:small)?matrix|array)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}", re.DOTALL)
_SET_BUILDER = re.compile(r"([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?[|:](?=.*\1)")
_CASES = re.compile(r"\\begin\{(?:cases|aligned|array)\}(.*)\\end\{(?:cases|aligned|array)\}", re.DOTALL)
_RELATION = r"\\(?:le|ge|ne|in|approx|equiv|subset)(?![A-Za-z])|[=<>]"
_UNION = r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])"


_NESTING = r"(?P<open>[(\[{]|\\begin(?![A-Za-z])|\\langle)|(?P<close>[)\]}]|\\end(?![A-Za-z])|\\rangle)"


@functools.cache
def _splitter(separators: str) -> re.Pattern[str]:
    return re.compile(f"(?P<sep>{separators})|{_NESTING}")


def split_top(s: str, separators: str) -> tuple[list[str], list[str]]:
    """Parts of `s` between top-level matches of the regex, and the matches. Brackets and environments protect."""
    if re.search(separators, s) is None:
        return [s.strip()], []
    parts: list[str] = []
    found: list[str] = []
    depth = start = 0
    for match in _splitter(separators).finditer(s):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif depth == 0 and len(parts) < MAX_PARTS:
            parts.append(s[start : match.start()].strip())
            found.append(match["sep"])
            start = match.end()
    parts.append(s[start:].strip())
    return parts, found


def _wrapped(s: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) when one pair of brackets wraps all of `s`; `\{`, `\langle` count as brackets."""
    opening = next((o for o in ("\\{", "\\langle", "\\lbrack", "(", "[", "{") if s.startswith(o)), None)
    closing = next((c for c in ("\\}", "\\rangle", "\\rbrack", ")", "]", "}") if s.endswith(c)), None)
    if opening is None or closing is None or len(s) < len(opening) + len(closing):
        return None
    depth = 0
    inside_end = len(s) - 1
    for at, character in enumerate(s):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth == 0 and at < inside_end:
                return None
    if opening == "\\langle" and s.count("\\langle") != 1:
        return None
    if depth != 0:
        return None
    return opening, s[len(opening) : len(s) - len(closing)].strip(), closing


def parse_answer(s: str, nesting: int = 0) -> Answer:
    """The outer structure of a normalised answer."""
    s = s.strip()
    if nesting > MAX_NESTING:
        return Scalar(s)
    if (rows := _cases(s, nesting)) is not None:
        return rows
    for separator in (";", ","):
        parts, _ = split_top(s, separator)
        parts = [part for part in parts if part]
        if len(parts) > 1:
            return Sequence(s, tuple(parse_answer(part, nesting + 1) for part in parts))
    parts, _ = split_top(s, _UNION)
    if len(parts) > 1:
        return Union(s, tuple(parse_answer(part, nesting + 1) for part in parts))
    sides, operators = split_top(s, _RELATION)
    if operators and all(sides[1:]):
        return Relation(s, tuple(sides), tuple(operators))
    wrapped = _wrapped(s)
    several = wrapped is not None and len(split_top(wrapped[1], "[,;]")[0]) > 1
    if not several and ("\\pm" in s or "\\mp" in s):
        return _plus_minus(s, nesting)
    return _bracketed(s, nesting)


def _plus_minus(s: str, nesting: int) -> Answer:
    r"""`a \pm b` is the two answers a + b and a - b (all signs of one answer go together)."""
    upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", s))
    lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", s))
    return Sequence(s, (parse_answer(upper, nesting + 1), parse_answer(lower, nesting + 1)))


def _bracketed(s: str, nesting: int) -> Answer:
    matrix = _MATRIX.fullmatch(_unwrap_array(s))
    if matrix is not None and "\\begin" not in matrix[2]:
        return _matrix(s, matrix[2], nesting)
    wrapped = _wrapped(s)
    if wrapped is None:
        return Scalar(s)
    opening, inside, closing = wrapped
    if opening == "{":
        return parse_answer(inside, nesting + 1)
    if opening == "\\{" and (condition := _SET_BUILDER.match(inside)) is not None:
        return parse_answer(inside[condition.end() :], nesting + 1)
    items, _ = split_top(inside, "[,;]")
    items = [item for item in items if item]
    brace = opening == "\\{"
    if len(items) < 2 and not brace:
        return Scalar(s) if opening != "(" else _parenthesised(s, inside, nesting)
    shown = {"\\{": "{", "\\langle": "(", "\\lbrack": "["}.get(opening, opening)
    shown_closing = {"\\}": "}", "\\rangle": ")", "\\rbrack": "]"}.get(closing, closing)
    return Sequence(s, tuple(parse_answer(item, nesting + 1) for item in items), shown, shown_closing)


def _parenthesised(s: str, inside: str, nesting: int) -> Answer:
    """(x) around a single answer."""
    inner = parse_answer(inside, nesting + 1)
    return Scalar(s) if isinstance(inner, Scalar) else inner


def _cases(s: str, nesting: int) -> Answer | None:
    r"""\begin{cases} a \\ b \end{cases} without conditions is the list of its rows, all of which hold."""
    match = _CASES.fullmatch(s)
    if match is None or "&" in match[1] or "\\begin" in match[1]:
        return None
    rows = [row.strip().rstrip(",") for row in match[1].split("\\\\") if row.strip()]
    return Sequence(s, tuple(parse_answer(row, nesting + 1) for row in rows)) if len(rows) > 1 else None


def _unwrap_array(s: str) -> str:
    r"""\left[\begin{array}...\end{array}\right] (sizes already dropped) without its brackets."""
    if s[:1] in ("[", "(") and s[1:].lstrip().startswith("\\begin") and s.endswith(("]", ")")):
        return s[1:-1].strip()
    return s


def _matrix(s: str, body: str, nesting: int) -> Answer:
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])", body)]
    rows = [re.sub(r"\\hline", "", row) for row in rows if row]
    cells = tuple(tuple(parse_answer(cell, nesting + 1) for cell in row.split("&")) for row in rows)
    return Matrix(s, cells)
