"""The shape of an answer: scalar, list, tuple, interval, set, union, relation, matrix.

`parse_answer` takes a normalised answer and splits it at the outermost level, again and again, until scalars are
left. It does not look into scalars; `scalar.py` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PARTS = 200
MAX_NESTING = 12


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
    """Rows of entries. kind: "" for a matrix, "v" for a determinant, "V" for a norm."""

    text: str
    rows: tuple[tuple[Answer, ...], ...]
    kind: str = ""


Answer = Scalar | Sequence | Relation | Union | Matrix

_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{([bpvVBs]?(?:small)?matrix|array)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}\s*[\])]?", re.DOTALL
)
_SYSTEM = re.compile(r"\\begin\{(cases|aligned|gathered)\}(.*?)\\end\{\1\}", re.DOTALL)
_ROWS = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])")
_SET_BUILDER = re.compile(r"([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?[|:](?=.*\1)")
_RELATION = r"\\(?:le|ge|ne|in|notin|approx|equiv|subset|subseteq)(?![A-Za-z])|[=<>]"
_BOUNDS = {"<", ">", "\\le", "\\ge", "\\ne", "\\in"}
_CONDITION_WORDS = "for|where|with|if|when|whenever|such that|since|provided|assuming|as"
_CONDITION = re.compile(
    rf"[,;]?\s*(?:\\text\{{\s*,?\s*\(?\s*(?:{_CONDITION_WORDS})\b.*|\\forall(?![A-Za-z]).*"
    rf"|(?<![A-Za-z\\])(?:{_CONDITION_WORDS})\s+(?=[A-Za-z\\$]).*"
    r"|\(\s*(?:\\text\{[^{}]*\}|[A-Za-z]\s*(?:[<>]|\\(?:ge|le|ne|in)(?![A-Za-z])))[^()]*(?:\([^()]*\)[^()]*)*\)$)",
    re.DOTALL,
)
_UNION = r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])"
_NESTING = r"(?P<open>[(\[{]|\\begin(?![A-Za-z]))|(?P<close>[)\]}]|\\end(?![A-Za-z]))"


def split_top(s: str, separators: str) -> tuple[list[str], list[str]]:
    """Parts of `s` between top-level matches of the regex, and the matches. Brackets and environments protect."""
    if re.search(separators, s) is None:
        return [s.strip()], []
    parts: list[str] = []
    matches: list[str] = []
    depth = start = 0
    for match in re.finditer(f"(?P<sep>{separators})|{_NESTING}", s):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif depth == 0 and len(parts) < MAX_PARTS:
            parts.append(s[start : match.start()].strip())
            matches.append(match["sep"])
            start = match.end()
    parts.append(s[start:].strip())
    return parts, matches


def _wrapped(s: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) when one pair of brackets wraps all of `s`; `\{` counts as a bracket."""
    match = re.fullmatch(r"(\\?[{]|[(\[])(.*?)(\\?[}]|[)\]])", s, re.DOTALL)
    if match is None:
        return None
    depth = 0
    for at, character in enumerate(s):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and character in _CLOSE and at < len(s) - 1:
            return None
    return None if depth else (match[1], match[2].strip(), match[3])


def parse_answer(s: str, nesting: int = 0) -> Answer:
    s = s.strip()
    if nesting > MAX_NESTING:
        return Scalar(s)
    for separator in (";", ","):
        parts = [part for part in split_top(s, separator)[0] if part]
        if len(parts) > 1:
            return Sequence(s, tuple(parse_answer(part, nesting + 1) for part in parts))
    if len(parts := split_top(s, _UNION)[0]) > 1:
        return Union(s, tuple(parse_answer(part, nesting + 1) for part in parts))
    sides, operators = split_top(s, _RELATION)
    if operators and all(sides[1:]):
        return Relation(s, tuple(sides), tuple(operators))
    wrapped = _wrapped(s)
    several = wrapped is not None and len(split_top(wrapped[1], "[,;]")[0]) > 1
    if not several and ("\\pm" in s or "\\mp" in s):
        # The answers a + b and a - b: all signs of one answer go together.
        commands = re.compile(r"\\(pm|mp)(?![A-Za-z])")
        both = [commands.sub(lambda match: signs[match[1] == "mp"], s) for signs in ("+-", "-+")]  # noqa: B023
        return Sequence(s, tuple(parse_answer(side, nesting + 1) for side in both))
    return _bracketed(s, nesting)


def split_condition(s: str) -> tuple[str, str]:
    r"""(answer, condition behind it): `\text{ for all } n`, `(x > 0)`, `, k \in \mathbb{Z}`, or nothing."""
    match = _CONDITION.search(s)
    if match is not None and match.start() > 0:
        return s[: match.start()].rstrip(" ,;"), match.group().strip(" ,;")
    parts, _ = split_top(s, "[,;]")
    for at, part in enumerate(parts[1:], start=1):
        operators = split_top(part, _RELATION)[1]
        index_range = operators == ["="] and "\\ldots" in s
        if (set(operators) & _BOUNDS and not set(split_top(parts[0], _RELATION)[1]) & _BOUNDS) or index_range:
            start = s.index(part, sum(map(len, parts[:at])))
            return s[:start].rstrip(" ,;"), s[start:]
    return s, ""


def _bracketed(s: str, nesting: int) -> Answer:
    matrix = _MATRIX.fullmatch(s)
    if matrix is not None and "\\begin" not in matrix[2]:
        rows = [row for row in _ROWS.split(matrix[2]) if row.strip()]
        cells = tuple(tuple(parse_answer(cell, nesting + 1) for cell in row.split("&")) for row in rows)
        return Matrix(s, cells, matrix[1][0] if matrix[1][0] in "vV" else "")
    system = _SYSTEM.fullmatch(s)
    if system is not None and (system[1] != "cases" or "&" not in system[2]):  # else cases of one function
        rows = [row.strip(" ,;") for row in _ROWS.split(system[2].replace("&", "")) if row.strip()]
        return Sequence(s, tuple(parse_answer(row, nesting + 1) for row in rows))
    wrapped = _wrapped(s)
    if wrapped is None:
        return Scalar(s)
    opening, inside, closing = wrapped
    if opening == "{":
        return parse_answer(inside, nesting + 1)
    if opening == "\\{" and (condition := _SET_BUILDER.match(inside)) is not None:
        return parse_answer(inside[condition.end() :], nesting + 1)
    items = [item for item in split_top(inside, "[,;]")[0] if item]
    if len(items) < 2 and opening != "\\{":
        inner = parse_answer(inside, nesting + 1) if opening == "(" else Scalar(s)
        return Scalar(s) if isinstance(inner, Scalar) else inner
    parsed = tuple(parse_answer(item, nesting + 1) for item in items)
    return Sequence(s, parsed, opening.removeprefix("\\"), closing.removeprefix("\\"))
