"""Equality of structured answers: lists, tuples, sets, intervals, named values, vectors, matrices."""

from __future__ import annotations

import pytest

from gxpo_trainer.grading.compare import MAX_MATCHED, answers_equal
from gxpo_trainer.grading.latex import clean
from gxpo_trainer.grading.structure import parse_answer


def equal(gold: str, answer: str) -> bool | None:
    return answers_equal(parse_answer(clean(gold)), parse_answer(clean(answer)))


def numbers(upwards: bool, count: int) -> str:
    return ", ".join(str(n) for n in (range(count) if upwards else range(count - 1, -1, -1)))


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        # Bare lists have no order, tuples have one; a gold in parentheses takes a bare list in its order.
        ("1, 2", ["2, 1", "(1, 2)"], ["1, 3", "1, 2, 3"]),
        ("1, 1, 2", [], ["1, 2, 2"]),
        ("1, 2, 3", [], ["1, 2"]),
        ("(1, 2)", ["1, 2"], ["(2, 1)", "2, 1"]),
        ("2, 1", [], ["(1, 2)"]),
        # Of brackets around three values only their order counts, around two they may be an interval.
        ("(1, 2, 3)", ["[1, 2, 3]"], ["[1, 3, 2]"]),
        ("(1, 2)", [], ["[1, 2]"]),
        ("[1, 2]", ["[1, 2]"], ["(1, 2)", "1, 2"]),
        ("1, 2", [], ["[1, 2]"]),
        ("1, 2, 3", ["[1, 2, 3]"], []),
        # Sets have no order, and a repeated element counts once; a set is no tuple.
        (r"\{1, 2\}", [r"\{2, 1\}", r"\{1, 2, 2\}", "2, 1"], [r"\{1, 2, 3\}", "(1, 2)", "1, 2, 2"]),
        (r"\{1, 2, 2\}", [r"\{1, 2\}"], []),
        (r"\{1, 2, 3\}", [], [r"\{1, 2\}"]),
        ("(1, 2)", [], [r"\{1, 2\}"]),
        ("1, 2", [r"\{2, 1\}"], []),
        ("1, 2, 2", [], [r"\{1, 2\}", "1, 2"]),
        # Lists of solutions: repetitions count once, in any order.
        ("(1, 2), (3, 4)", ["(3, 4), (1, 2)", "(1, 2), (3, 4), (1, 2)"], ["(1, 2), (3, 4), (5, 6)", "(1, 2)"]),
        # One answer against several is the same only where the several are one.
        ("5", [r"\{5\}"], ["5, 6", r"\{6\}"]),
        ("5, 6", [], ["5"]),
        (r"\{5\}", ["5"], []),
        (r"\{5, 6\}", [], ["5"]),
        # Names of values are followed where both sides give them.
        ("x = 5", ["5"], ["6", "y = 5"]),
        ("5", ["x = 5"], ["x = 6"]),
        ("f(x) = 2x", ["y = 2x"], ["y = 3x"]),
        (r"x \approx 0.5", ["0.5"], []),
        ("x < 5", [], ["5"]),
        # Both name their values: by name. Only one does: in the gold's order, but x_1 and x_2 have none.
        ("a = 1, b = 2", ["b = 2, a = 1", "1, 2"], ["a = 2, b = 1", "2, 1", "c = 1, d = 2"]),
        ("1, 2", ["b = 1, a = 2"], []),
        ("2, 1", ["x_1 = 1, x_2 = 2"], ["b = 1, a = 2"]),
        ("x_1 = 1, x_2 = 2", ["2, 1", "y_1 = 2, y_2 = 1"], []),
        ("x = 1, x = 2", ["2, 1", "x = 2, x = 1"], []),
        ("(a, b) = (1, 2)", ["(1, 2)"], []),
        # A name that comes again begins the next solution.
        ("p = 5, q = 2, p = 7, q = 3",
         ["(5, 2), (7, 3)", "(7, 3), (5, 2)", "p = 7, q = 3, p = 5, q = 2"],
         ["(5, 3), (7, 2)"]),
        ("p = 5, q = 2; p = 7, q = 3", ["(5, 2), (7, 3)"], ["(5, 3), (7, 2)"]),
        ("p = 1, q = 2, p = 3", ["3, 2, 1"], ["3, 2, 2"]),
        # Both signs are two answers.
        (r"\pm 3", ["3, -3"], ["3"]),
        (r"x = \pm 3", ["-3, 3"], []),
        (r"x = 1 \pm \sqrt{2}", [r"1 - \sqrt{2}, 1 + \sqrt{2}"], [r"1 - \sqrt{2}, 1 + \sqrt{3}"]),
        (r"0, \pm 3", ["3, 0, -3"], []),
        (r"x = 0, x = \pm 3", ["3, 0, -3"], []),
        # Vectors and matrices entry by entry.
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
         [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
         [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}",
          r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "(1, 2, 3, 4)"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", ["(1, 2)"], [r"\{1, 2\}", "5"]),
        ("(1, 2)",
         [r"\begin{pmatrix}1\\2\end{pmatrix}"],
         [r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1&2&3\end{pmatrix}"]),
        (r"\begin{pmatrix}1&2&3\end{pmatrix}", ["(1, 2, 3)"], ["(1, 2)", "(1, 2, 4)"]),
        (r"\begin{pmatrix}1&2\end{pmatrix}", [], [r"\begin{pmatrix}1\\2\end{pmatrix}"]),
        # Vectors by their components, or as sums of unit vectors.
        (r"2\vec{i} + 3\vec{j}", ["(2, 3)", "2i + 3j"], ["3i + 2j"]),
        ("(2, 3)", [r"2\vec{i} + 3\vec{j}"], []),
        ("(2, 4)", [], [r"2\vec{i} + 3\vec{j}"]),
        (r"\vec{i} - 2\vec{k}",
         [r"\begin{pmatrix}1\\0\\-2\end{pmatrix}", r"\begin{pmatrix}1&0&-2\end{pmatrix}"],
         [r"\begin{pmatrix}1\\-2\end{pmatrix}"]),
        ("2i + 3j", [r"2\vec{i} + 3\vec{j}"], []),
        # Unions of letters pair off, and unions of numbers are sets.
        (r"(1, 2) \cup (a, b)", [r"(a, b) \cup (1, 2)"],
         [r"(1, 2) \cup (a, c)", r"(1, 2) \cup (a, b) \cup (3, 4)", "(1, 2)"]),
        ("(1, 2)", [], [r"(1, 2) \cup (a, b)"]),
        (r"(1, 2) \cup (2, 3)", [], ["(1, 3)"]),
        (r"(1, 2] \cup (2, 3)", ["(1, 3)"], []),
        ("1 < x < 3", ["(1, 3)"], []),
        (r"x \in (1, 3)", ["1 < x < 3"], []),
    ],
)  # fmt: skip
def test_answers_are_equal_part_by_part(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: equal(gold, answer) for answer in expected} == expected


def test_long_lists_are_compared_in_order_only() -> None:
    assert equal(numbers(True, MAX_MATCHED), numbers(False, MAX_MATCHED)) is True
    assert equal(numbers(True, MAX_MATCHED + 1), numbers(True, MAX_MATCHED + 1)) is True
    assert equal("00, " + numbers(True, MAX_MATCHED), numbers(True, MAX_MATCHED) + ", 00") is False


def test_a_long_set_with_repetitions_is_not_searched_through() -> None:
    def solutions(count: int) -> str:
        return ", ".join(f"({n}, 0)" for n in range(count))

    assert equal(solutions(MAX_MATCHED - 1), solutions(MAX_MATCHED - 1) + ", (0, 0)") is True
    assert equal(solutions(MAX_MATCHED), solutions(MAX_MATCHED) + ", (0, 0)") is False


def test_an_undecided_part_leaves_the_whole_undecided_unless_another_differs() -> None:
    unreadable, other = r"\int_0^1 \heartsuit", r"\oint \clubsuit"
    assert equal(unreadable, other) is None
    assert equal(f"(1, {unreadable})", f"(1, {other})") is None
    assert equal(f"(1, {unreadable})", f"(2, {other})") is False
    assert equal(f"1, {unreadable}", f"1, {other}") is None
