"""The shape that `parse_answer` gives a cleaned answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gxpo_trainer.grading import structure

Shape = str | tuple["str | tuple[object, ...]", ...]


def shape(answer: structure.Answer) -> Shape:
    """Nested tuples: the brackets or the kind first, then the parts."""
    match answer:
        case structure.Scalar(text):
            return text
        case structure.Sequence(_, items, opening, closing):
            return (opening + closing, *map(shape, items))
        case structure.Relation(_, sides, operators):
            return ("relation", *(part for pair in zip(sides, (*operators, ""), strict=True) for part in pair if part))
        case structure.Union(_, items):
            return ("union", *map(shape, items))
        case structure.Matrix(_, rows, kind):
            return ("matrix" + kind, *(tuple(map(shape, row)) for row in rows))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", "5"), (" x + 1 ", "x + 1"), ("", ""),
        # Lists: by semicolons first, then by commas; empty parts are nothing.
        ("1, 2", ("", "1", "2")), ("1; 2", ("", "1", "2")), ("1, 2; 3", ("", ("", "1", "2"), "3")),
        ("1, , 2,", ("", "1", "2")), (", 1", ", 1"), ("1,", "1,"), ("(1, 2), 3", ("", ("()", "1", "2"), "3")),
        ("f(1, 2), 3", ("", "f(1, 2)", "3")),
        # Brackets around the whole.
        ("(1, 2)", ("()", "1", "2")), ("[1, 2)", ("[)", "1", "2")), ("[1; 2]", ("[]", "1", "2")),
        (r"\{1, 2\}", ("{}", "1", "2")), (r"\{1\}", ("{}", "1")), (r"\{\}", ("{}",)), ("{1, 2}", ("", "1", "2")),
        ("{5}", "5"), ("{{5}}", "5"), ("(5)", "(5)"), ("[5]", "[5]"), ("(x) + (y)", "(x) + (y)"), ("(1)(2)", "(1)(2)"),
        ("(x = 5)", ("relation", "x", "=", "5")), ("((1, 2))", ("()", "1", "2")), ("[(1, 2)]", "[(1, 2)]"),
        ("((1, 2), 3)", ("()", ("()", "1", "2"), "3")), ("(1, 2", "(1, 2"),
        # Intervals as the French write them.
        ("]1, 2[", ("()", "1", "2")), ("[1, 2[", ("[)", "1", "2")), ("]1; 2]", ("(]", "1", "2")),
        ("[1, 2]", ("[]", "1", "2")), (r"]1, 2[ \cup ]3, 4]", ("union", ("()", "1", "2"), ("(]", "3", "4"))),
        (r"x \in ]1, 2[", ("relation", "x", r"\in", "(1, 2)")),
        # Unions and relations.
        (r"(1, 2) \cup [3, 4)", ("union", ("()", "1", "2"), ("[)", "3", "4"))),
        ("(1, 2) U [3, 4)", ("union", ("()", "1", "2"), ("[)", "3", "4"))), ("x = 5", ("relation", "x", "=", "5")),
        ("2^9 = 512", ("relation", "2^9", "=", "512")), ("x = y = 5", ("relation", "x", "=", "y", "=", "5")),
        (r"1 \le x < 2", ("relation", "1", r"\le", "x", "<", "2")), (r"x \ne 2", ("relation", "x", r"\ne", "2")),
        (r"x \leftarrow 2", r"x \leftarrow 2"), ("= 5", ("relation", "=", "5")), ("x =", "x ="),
        ("x = 1, y = 2", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        # Both signs.
        (r"\pm 3", ("", "+ 3", "- 3")), (r"1 \pm 2 \mp x", ("", "1 + 2 - x", "1 - 2 + x")),
        (r"(1 \pm 2)", ("", "(1 + 2)", "(1 - 2)")), (r"(\pm 1, 2)", ("()", ("", "+ 1", "- 1"), "2")),
        (r"x = \pm 3", ("relation", "x", "=", r"\pm 3")),
        # Matrices and determinants.
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", ("matrix", ("1", "2"), ("3", "4"))),
        (r"\begin{matrix}1\\2\\\end{matrix}", ("matrix", ("1",), ("2",))),
        (r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", ("matrix", ("1",), ("2",))),
        (r"\begin{bmatrix}1 \cr 2\end{bmatrix}", ("matrix", ("1",), ("2",))),
        (r"\begin{vmatrix}1&2\end{vmatrix}", ("matrixv", ("1", "2"))),
        (r"\begin{Vmatrix}1&2\end{Vmatrix}", ("matrixV", ("1", "2"))),
        (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)".replace(r"\left", "").replace(r"\right", ""),
         ("matrix", ("1", "2"), ("3", "4"))),
        ("(1, 2)^T", ("()", "1", "2")), (r"(1, 2, 3)^{\top}", ("()", "1", "2", "3")), ("(1 + x)^T", "(1 + x)^T"),
        # Rows that all hold; a row of a case distinction is the pair of value and condition.
        (r"\begin{cases}x = 1\\y = 2\end{cases}", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        (r"\begin{cases}1 & x > 0\\0 & \text{otherwise}\end{cases}",
         ("", ("()", "1", ("relation", "x", ">", "0")), ("()", "0", ""))),
        (r"\begin{cases}1, & \text{if } x > 0\\0 & x = 0\end{cases}",
         ("", ("()", "1", ("relation", "x", ">", "0")), ("()", "0", ("relation", "x", "=", "0")))),
        (r"\begin{cases}x &= 1\\y &= 2\end{cases}", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        (r"\begin{cases}x = & 1\\y = & 2\end{cases}", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        (r"\begin{aligned}x &= 1\\y &= 2,\end{aligned}",
         ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        (r"\begin{aligned}1 & 2\\3 & 4\end{aligned}", ("", "1 2", "3 4")),
        (r"\begin{aligned}x &= 1\end{aligned}", ("relation", "x", "=", "1")),
        (r"\begin{cases}x = 1\end{cases}", ("relation", "x", "=", "1")),
        (r"\begin{array}{l}x = 1\\y = 2\end{array}", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        (r"\begin{array}{l}1\end{array}", ("matrix", ("1",))),
        (r"\{\begin{array}{l}x = 1\\y = 2\end{array}", ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2"))),
        # Sets by their condition.
        (r"\{x : 1 < x < 2\}", ("relation", "1", "<", "x", "<", "2")),
        (r"\{x \in \mathbb{R} | x > 2\}", ("relation", "x", ">", "2")),
        (r"\{x : y > 2\}", ("{}", ("relation", "x : y", ">", "2"))),
    ],
)  # fmt: skip
def test_answers_are_split_at_their_outermost_level(text: str, expected: Shape) -> None:
    assert shape(structure.parse_answer(text)) == expected


def nested(wrap: Callable[[str], str], count: int) -> str:
    text = "7"
    for _ in range(count):
        text = wrap(text)
    return text


def innermost(answer: structure.Answer) -> str:
    """The text of the last scalar below the last part of everything."""
    while not isinstance(answer, structure.Scalar):
        assert not isinstance(answer, structure.Relation)
        answer = answer.rows[-1][-1] if isinstance(answer, structure.Matrix) else answer.items[-1]
    return answer.text


@pytest.mark.parametrize(
    "wrap",
    [lambda inside: f"(1, {inside})", lambda inside: rf"\{{1; {inside}\}}", lambda inside: f"{{{inside}}}"],
    ids=["tuple", "set", "group"],
)
@pytest.mark.parametrize(
    ("outside", "levels"),
    [
        ("{}", 0),
        ("1, {}", 1),
        (r"(1, 2) \cup {}", 1),
        (r"\begin{{cases}}1\\{}\end{{cases}}", 1),
        (r"\begin{{cases}}1 & 2\\3 & {}\end{{cases}}", 1),
        (r"\begin{{aligned}}{}\end{{aligned}}", 1),
        (r"\begin{{pmatrix}}1\\{}\end{{pmatrix}}", 1),
        (r"{{(\pm 1, {})}}", 3),
    ],
)
def test_structure_is_followed_to_a_fixed_depth(wrap: Callable[[str], str], outside: str, levels: int) -> None:
    followed = structure.MAX_NESTING + 1 - levels
    assert innermost(structure.parse_answer(outside.format(nested(wrap, followed)))) == "7"
    assert innermost(structure.parse_answer(outside.format(nested(wrap, followed + 1)))) == wrap("7")
    assert innermost(structure.parse_answer(outside.format(nested(wrap, followed + 3)))) == nested(wrap, 3)


def test_text_is_split_at_top_level_separators_only() -> None:
    assert structure.split_top("1, (2, 3), 4", ",") == (["1", "(2, 3)", "4"], [",", ","])
    assert structure.split_top("a < b = c", "[<=]") == (["a", "b", "c"], ["<", "="])
    assert structure.split_top(r"\begin{x}1, 2\end{x}, 3", ",") == ([r"\begin{x}1, 2\end{x}", "3"], [","])
    assert structure.split_top("{1, [2, 3)}, 4", ",") == (["{1, [2, 3)}", "4"], [","])
    assert structure.split_top(" 5 ", ",") == (["5"], [])
    parts, separators = structure.split_top(",".join("x" * (structure.MAX_PARTS + 5)), ",")
    assert (len(parts), len(separators)) == (structure.MAX_PARTS + 1, structure.MAX_PARTS)
    assert parts[-1] == "x,x,x,x,x"


@pytest.mark.parametrize(
    ("text", "answer", "condition"),
    [
        ("5", "5", ""), (r"2^n \text{ for } n > 1", "2^n", r"\text{ for } n > 1"), (r"2^n, n > 1", "2^n", "n > 1"),
        (r"2^n; n \ge 1", "2^n", r"n \ge 1"), (r"2^n, n \ge 1, n \ne 3", "2^n", r"n \ge 1, n \ne 3"),
        (r"1, 2, n > 1", "1, 2", "n > 1"), (r"x_k = k, k = 1, \ldots, n", "x_k = k", r"k = 1, \ldots, n"),
        ("x = 1, y = 2", "x = 1, y = 2", ""), ("x > 1, x < 2", "x > 1, x < 2", ""),
        (r"x^2 (x \ne 0)", "x^2", r"(x \ne 0)"), (r"x^2 (\text{if } x > 0)", "x^2", r"(\text{if } x > 0)"),
        ("2k where k is odd", "2k", "where k is odd"), (r"\text{for all } n", r"\text{for all } n", ""),
        (r"2k \forall k", "2k", r"\forall k"), (r"2^n-1\text{ for all }n", "2^n-1", r"\text{ for all }n"),
        (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{4}+k\pi", r"k\in\mathbb{Z}"),
        ("x^2 (x > 0)", "x^2", "(x > 0)"), ("f(x)", "f(x)", ""), ("2, 3", "2, 3", ""),
    ],
)  # fmt: skip
def test_conditions_stand_behind_the_answer(text: str, answer: str, condition: str) -> None:
    assert structure.split_condition(text) == (answer, condition)
