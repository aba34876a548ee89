"""Assignments, equations, inequalities and sets of reals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from gxpo_trainer.grading import compare, structure
from gxpo_trainer.grading.compare import answers_equal
from gxpo_trainer.grading.latex import clean
from gxpo_trainer.grading.structure import Relation, parse_answer


def relation(text: str) -> Relation:
    parsed = parse_answer(text)
    assert isinstance(parsed, Relation)
    return parsed


def sets_equal(gold: str, answer: str) -> bool | None:
    a, b = parse_answer(clean(gold)), parse_answer(clean(answer))
    verdict = answers_equal(a, b)
    assert answers_equal(b, a) is verdict
    return verdict


@pytest.mark.parametrize(
    ("text", "assignment", "value", "name"),
    [
        ("x = 5", True, "5", "x"), ("x_{1} = 5", True, "5", "x_1"), ("f(x) = 2x", True, "2x", "f(x)"),
        (r"f^{-1}(x) = 2x", None, "2x", None), ("x = y = 5", True, "5", "x"),
        (r"x = \sqrt{2} \approx 1.4", True, r"\sqrt{2}", "x"), (r"x \approx 1.4", True, "1.4", "x"),
        (r"x \in (1, 2)", True, "(1, 2)", "x"), ("|AB| = 5", True, "5", "|AB|"),
        (r"\bar{x} = 5", True, "5", r"\barx"), (r"\overline{AB} = 5", True, "5", r"\overlineAB"),
        (r"\vec{v}_1 = (1, 2)", True, "(1, 2)", r"\vecv_1"), (r"\mathbb{E}[X] = 5", True, "5", r"\mathbbE[X]"),
        ("E[X] = 5", True, "5", "E[X]"), (r"\text{area} = 5", True, "5", r"\textarea"),
        (r"\angle ABC = 5", True, "5", r"\angleABC"),
        ("(p, q) = (1, 2)", True, "(1, 2)", "(p,q)"), ("A:B = 2:3", True, "2:3", "A:B"),
        ("a + b = 5", False, "5", None), ("2^9 = 512", False, "512", None), ("2^9 = 513", False, "513", None),
        (r"1.41 \approx x", False, "1.41", None), ("2x + z = 1", False, None, None),
        ("x^2 + 2x + 1 = (x+1)^2", False, "(x+1)^2", None), ("2x = x + x = 3x", False, None, None),
        ("x < 5", False, None, None), ("x = y < 5", False, None, None), (r"\frac{1}{2} = 0.5", False, "0.5", None),
    ],
)  # fmt: skip
def test_assignments_state_a_value(text: str, assignment: bool | None, value: str | None, name: str | None) -> None:
    parsed = relation(text)
    assert compare.value_of(parsed) == value
    if assignment is not None:
        assert compare.is_assignment(parsed) is assignment
        assert compare.assigned_name(parsed) == name


def test_names_are_the_same_or_both_a_function_value() -> None:
    same = {
        ("x = 1", "x = 2"): True, ("x_1 = 1", "x_{1} = 2"): True, ("x = 1", "y = 1"): False,
        ("y = x", "f(x) = x"): True, ("f(x) = x", "y = x"): True, ("x = 1", "f(x) = x"): False,
        ("f(x) = x", "g(x) = x"): True, ("f(x) = x", "g(t) = t"): False, ("x = 1", "1"): False, ("1", "1"): False,
    }  # fmt: skip
    assert {(a, b): compare.same_name(parse_answer(a), parse_answer(b)) for a, b in same} == same


@pytest.mark.parametrize(
    ("gold", "same", "different", "undecided"),
    [
        ("2x + y = 3", ["4x + 2y = 6", "-2x - y = -3", "y = 3 - 2x"], ["y = 3 + 2x"], []),
        # A factor without a finite decimal form leaves rounded coefficients.
        ("2x + 3y = 5", ["y = -0.66667x + 1.66667"], ["y = -0.6657x + 1.6667"], []),
        ("x + y < 3", ["-x - y > -3", "3 > x + y", "2x + 2y < 6"], ["x + y > 3", "-x - y < -3", r"x + y \le 3"], []),
        (r"x + y \le 3", [r"-x - y \ge -3"], [], []),
        (r"x + y \ne 3", [r"3 - x - y \ne 0"], ["x + y = 3"], []),
        ("a < b < c", ["c > b > a"], ["a < c < b", r"a < b \le c"], []),
        ("a = b = c", [], [], ["a = b"]),
    ],
)  # fmt: skip
def test_relations_equal_as_conditions(gold: str, same: list[str], different: list[str], undecided: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False) | dict.fromkeys(undecided)
    assert {answer: compare.relations_equal(relation(gold), relation(answer)) for answer in expected} == expected


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        ("x > 2", [r"(2, \infty)", "2 < x", "-x < -2"], [r"[2, \infty)", "x > 3", r"(-\infty, 2)", "2"]),
        (r"x \ge 2", [r"[2, \infty)", r"2 \le x"], [r"x > 2"]),
        (r"x \le 2", [r"(-\infty, 2]", r"2 \ge x"], [r"(-\infty, 2)", r"[-\infty, 2]"]),
        ("0 < x < 1", ["(0, 1)", "1 > x > 0"], ["[0, 1)", "0, 1", r"\{0, 1\}", "0 < x < 2"]),
        (r"-1 \le x < 4", ["[-1,4)", r"4 > x \ge -1"], ["(-1,4)", "[-1,4]", "[-1,5)"]),
        ("x < 1, x > 3", [r"(-\infty, 1) \cup (3, \infty)", r"x > 3 \text{ or } x < 1"], ["(1, 3)", "x < 1"]),
        ("x < 1, y > 3", [], [r"(-\infty, 1) \cup (3, \infty)"]),
        # Both bounds hold where "and" joins them.
        ("x > 2 and x < 5", ["(2, 5)", r"x < 5 \text{ and } x > 2"], ["x > 2 or x < 5", r"x > 2, x < 5", "[2, 5)"]),
        ("x < 2 and x > 5", [r"(-\infty,2) \cup (5,\infty)"], ["(2, 5)"]),  # a union is meant
        (r"1 \le x < 4", [r"x < 4 and x \ge 1"], [r"x \ge 1 and x \ge 4", "x < 4 and y > 1", r"x \le 1 and x < 4"]),
        (r"x \in [1, 2)", ["[1, 2)"], ["(1, 2)"]),
        (r"x \in \{1, 2\}", [r"\{2, 1\}"], ["(1, 2)"]),
        (r"x \ne 2", [r"(-\infty,2) \cup (2,\infty)", r"2 \ne x"], [r"\mathbb{R}", "x > 2", r"x \ne 3"]),
        (r"(-\infty, \infty)", [r"\mathbb{R}", r"\text{all real numbers}"], [r"[0,\infty)", r"x \ne 0"]),
        (r"(1, 2) \cup (3, 4)", [r"(3, 4) \cup (1, 2)"], [r"(1, 4)", "(1, 2), (3, 4)"]),
        (r"\{\}", [r"\emptyset", r"\text{no solution}"], [r"\{0\}", r"\mathbb{R}"]),
        (r"\frac{x}{3} < \frac{1}{9}", [r"3x < 1"], ["3x > 1"]),
        (r"\sqrt{2} < x < \pi", [r"(\sqrt{2}, \pi)"], ["(1.5, 3)"]),
        (r"f(x) > 2", [r"(2, \infty)", "y > 2"], []),
        ("x < 3", [], ["y < 3", "x < 3, y < 3"]),
        ("a < x < b", ["b > x > a"], ["(1, 2)"]),
    ],
)  # fmt: skip
def test_inequalities_are_intervals(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: sets_equal(gold, answer) for answer in expected} == expected


# The shape that `parse_answer` gives a cleaned answer.


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


def test_answers_are_split_at_their_outermost_level() -> None:
    shapes: dict[str, Shape] = {
        "5": "5", " x + 1 ": "x + 1", "": "",
        # Lists: by semicolons first, then by commas; empty parts are nothing.
        "1, 2": ("", "1", "2"), "1; 2": ("", "1", "2"), "1, 2; 3": ("", ("", "1", "2"), "3"),
        "1, , 2,": ("", "1", "2"), ", 1": ", 1", "1,": "1,", "(1, 2), 3": ("", ("()", "1", "2"), "3"),
        "f(1, 2), 3": ("", "f(1, 2)", "3"),
        # Brackets around the whole.
        "(1, 2)": ("()", "1", "2"), "[1, 2)": ("[)", "1", "2"), "[1; 2]": ("[]", "1", "2"),
        r"\{1, 2\}": ("{}", "1", "2"), r"\{1\}": ("{}", "1"), r"\{\}": ("{}",), "{1, 2}": ("", "1", "2"),
        "{5}": "5", "{{5}}": "5", "(5)": "(5)", "[5]": "[5]", "(x) + (y)": "(x) + (y)", "(1)(2)": "(1)(2)",
        "(x = 5)": ("relation", "x", "=", "5"), "((1, 2))": ("()", "1", "2"), "[(1, 2)]": "[(1, 2)]",
        "((1, 2), 3)": ("()", ("()", "1", "2"), "3"), "(1, 2": "(1, 2",
        # Unions and relations.
        r"(1, 2) \cup [3, 4)": ("union", ("()", "1", "2"), ("[)", "3", "4")),
        "(1, 2) U [3, 4)": ("union", ("()", "1", "2"), ("[)", "3", "4")), "x = 5": ("relation", "x", "=", "5"),
        "2^9 = 512": ("relation", "2^9", "=", "512"), "x = y = 5": ("relation", "x", "=", "y", "=", "5"),
        r"1 \le x < 2": ("relation", "1", r"\le", "x", "<", "2"), r"x \ne 2": ("relation", "x", r"\ne", "2"),
        r"x \leftarrow 2": r"x \leftarrow 2", "= 5": ("relation", "=", "5"), "x =": "x =",
        "x = 1, y = 2": ("", ("relation", "x", "=", "1"), ("relation", "y", "=", "2")),
        # Both signs.
        r"\pm 3": ("", "+ 3", "- 3"), r"1 \pm 2 \mp x": ("", "1 + 2 - x", "1 - 2 + x"),
        r"(1 \pm 2)": ("", "(1 + 2)", "(1 - 2)"), r"(\pm 1, 2)": ("()", ("", "+ 1", "- 1"), "2"),
        r"x = \pm 3": ("relation", "x", "=", r"\pm 3"),
        # Matrices and determinants.
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": ("matrix", ("1", "2"), ("3", "4")),
        r"\begin{matrix}1\\2\\\end{matrix}": ("matrix", ("1",), ("2",)),
        r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}": ("matrix", ("1",), ("2",)),
        r"\begin{bmatrix}1 \cr 2\end{bmatrix}": ("matrix", ("1",), ("2",)),
        r"\begin{vmatrix}1&2\end{vmatrix}": ("matrixv", ("1", "2")),
        r"\begin{Vmatrix}1&2\end{Vmatrix}": ("matrixV", ("1", "2")),
        r"(\begin{array}{cc}1&2\\3&4\end{array})": ("matrix", ("1", "2"), ("3", "4")),
        # Sets by their condition.
        r"\{x : 1 < x < 2\}": ("relation", "1", "<", "x", "<", "2"),
        r"\{x \in \mathbb{R} | x > 2\}": ("relation", "x", ">", "2"),
        r"\{x : y > 2\}": ("{}", ("relation", "x : y", ">", "2")),
    }  # fmt: skip
    assert {text: shape(structure.parse_answer(text)) for text in shapes} == shapes


def nested(wrap: Callable[[str], str], count: int) -> str:
    return functools.reduce(lambda text, _: wrap(text), range(count), "7")


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
        ("{}", 0), ("1, {}", 1), (r"(1, 2) \cup {}", 1), (r"\begin{{pmatrix}}1\\{}\end{{pmatrix}}", 1),
        (r"{{(\pm 1, {})}}", 3),
    ],
)  # fmt: skip
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


def test_conditions_stand_behind_the_answer() -> None:
    parts = {
        "5": ("5", ""), r"2^n \text{ for } n > 1": ("2^n", r"\text{ for } n > 1"), r"2^n, n > 1": ("2^n", "n > 1"),
        r"2^n; n \ge 1": ("2^n", r"n \ge 1"), r"2^n, n \ge 1, n \ne 3": ("2^n", r"n \ge 1, n \ne 3"),
        r"1, 2, n > 1": ("1, 2", "n > 1"), r"x_k = k, k = 1, \ldots, n": ("x_k = k", r"k = 1, \ldots, n"),
        "x = 1, y = 2": ("x = 1, y = 2", ""), "x > 1, x < 2": ("x > 1, x < 2", ""),
        r"x^2 (x \ne 0)": ("x^2", r"(x \ne 0)"), r"x^2 (\text{if } x > 0)": ("x^2", r"(\text{if } x > 0)"),
        "2k where k is odd": ("2k", "where k is odd"), r"\text{for all } n": (r"\text{for all } n", ""),
        r"2k \forall k": ("2k", r"\forall k"), r"2^n-1\text{ for all }n": ("2^n-1", r"\text{ for all }n"),
        r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}": (r"\frac{\pi}{4}+k\pi", r"k\in\mathbb{Z}"),
        "x^2 (x > 0)": ("x^2", "(x > 0)"), "f(x)": ("f(x)", ""), "2, 3": ("2, 3", ""),
    }  # fmt: skip
    assert {text: structure.split_condition(text) for text in parts} == parts
