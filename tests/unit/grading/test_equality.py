"""Where expressions are equal: tolerances, domains, factors."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.compare import MAX_MATCHED, answers_equal
from gxpo_trainer.grading.equality import expressions_equal, finite_decimal, proportional, values_equal
from gxpo_trainer.grading.expression import parse_expression
from gxpo_trainer.grading.latex import TooLarge, clean
from gxpo_trainer.grading.structure import parse_answer


def equal(a: str, b: str) -> bool:
    verdict = expressions_equal(parse_expression(a), parse_expression(b))
    assert expressions_equal(parse_expression(b), parse_expression(a)) is verdict
    return verdict


@pytest.mark.parametrize(
    ("value", "same", "different"),
    [
        # One part in 10,000 of the larger, where one is a decimal and the other has no finite decimal form.
        ("200/3", ["66.67", "66.673", "66.66", "66667e-3"], ["66.674", "66.659", "66667/1000"]),
        ("-200/3", ["-66.67"], ["66.67"]),
        ("1/300", ["0.003333"], ["0.00333"]),
        ("20/3", ["20/3.0001"], []),
        (r"x + 2(1 + \sqrt{2})", ["x + 2(1 + 1.41421)"], []),
        ("1/4", ["0.25"], ["0.25001"]),
        ("1/3", [], ["333/1000"]),
        (r"\sqrt{2}", ["1.4142"], ["1.414", r"\frac{14142}{10000}"]),
        (r"100\sqrt{2}", ["141.42"], ["141.4"]),
        (r"\pi", ["3.1416"], ["3.14"]),
        (r"\pi x", ["3.1416x"], ["3.14x"]),
        # Letters do not change that.
        ("1.5x + 20000", ["20000 + 3x/2"], ["1.5x + 20001", "3x/2 + 20001"]),
        ("20000(1.05)^t", [r"20000(\frac{21}{20})^t"], ["20001(1.05)^t"]),
        ("1000000 + 2.5x", [], ["1000000 + 2.6x"]),
        ("0.5x + 1000", ["x/2 + 1000"], ["0.5x + 1000.05", "x/2 + 1000.05"]),
        ("0.5/x + 1000x^{0.5}", ["1/2x^{-1} + 1000x^{1/2}"], ["0.5/x + 1000.05x^{0.5}"]),
        ("1000 + 0.5i", ["1000 + i/2"], ["1000.05 + 0.5i"]),
        ("x/3", ["0.33333x"], ["0.333x"]),
        ("1/(3x)", ["0.33333/x"], []),
        ("x^2/0 + 0.5x", [], ["x^2/0 + 0.5x"]),
        ("1e-30", [], ["2e-30"]),
        ("10^{-30}x", [], ["2*10^{-30}x"]),
    ],
)  # fmt: skip
def test_decimals_stand_for_values_without_a_finite_form(value: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: equal(value, answer) for answer in expected} == expected


def test_the_tolerance_is_relative_to_the_larger_value_and_includes_its_bound() -> None:
    third = Fraction(1, 3)
    assert values_equal(third, third * Fraction(9999, 10_000), decimal=True)
    assert not values_equal(third, third * Fraction(9998, 10_000), decimal=True)
    assert values_equal(third * 200, third * Fraction(19_998, 100), decimal=True)
    assert values_equal(-third, -third * Fraction(9999, 10_000), decimal=True)
    assert not values_equal(Fraction(1, 4), Fraction(2500001, 10_000_000), decimal=True)
    assert not values_equal(third, Fraction(3333, 10_000), decimal=False)
    assert [finite_decimal(Fraction(1, n)) for n in range(1, 11)] == [
        True, True, False, True, True, False, False, True, False, True,
    ]  # fmt: skip
    assert finite_decimal(Fraction(1, 2**100))
    assert finite_decimal(Fraction(1, 5**100))


def test_expressions_are_equal_as_functions() -> None:
    verdicts = {
        # Differences far from 0, between constants, near 0, and of either sign.
        ("|x-3|", "x-3"): False, ("|x+3|", "x+3"): False, ("|x-1000|+|x+1000|", "2000"): False,
        ("|x-0.001|", "0.001-x"): False, (r"\max(x, 50000)", "50000"): False, (r"\min(x, -5)", "-5"): False,
        (r"\max(1, i)", "5"): False, (r"\min(x, i)", "x"): False,
        ("|x-1|+|x-1.01|", "2*|x-1.005|"): False,
        (r"|x-\frac{\pi}{100}|+|x-\frac{\pi}{40}|", r"2*|x-\frac{7\pi}{400}|"): False,
        (r"\sqrt{(x-7)^2}", "|x-7|"): True, (r"\sqrt{x^2}\sqrt{y^2}", "|xy|"): True,
        (r"\sqrt{x^2}\sqrt{y^2}", "xy"): False, (r"\ln(x^2)", r"2\ln|x|"): True, ("|x|-|y|", "|x-y|"): False,
        (r"\max(x, y)", r"\frac{x+y+|x-y|}{2}"): True, (r"\min(x, y)", r"\frac{x+y+|x-y|}{2}"): False,
        (r"\lfloor x \rfloor", "x"): False, (r"\lceil x \rceil", r"-\lfloor -x \rfloor"): True,
        (r"\lfloor x \rfloor + 1", r"\lceil x \rceil"): False, ("(-1)^{2n}", "1"): True,
        ("(-1)^{n+1}", "-(-1)^n"): True, ("(-1)^n", "1"): False, ("(-2)^n", "2^n"): False, ("n!/(n-1)!", "n"): True,
        # Two sides that are nowhere defined together, and one that is nowhere defined.
        (r"\sqrt{-1-x^2}", r"i\sqrt{1+x^2}"): True, (r"\sqrt{-4}", "2i"): True, (r"\sqrt{-4}\sqrt{-9}", "-6"): True,
        (r"\sqrt{-4}", "-2i"): False, (r"\ln(-1)", r"i\pi"): True, ("1/0", "1/0"): False, ("x/0", "x/0"): False,
        ("1/0", "1"): False, (r"\sqrt{x}", r"\sqrt{|x|}"): False, (r"\frac{x^2-1}{x-1}", "x+1"): True,
        ("x", "y"): False, ("x-x", "0"): True, ("f(x)-f(x)", "0"): True, ("x^{10}+10^{-12}", "x^{10}"): False,
        ("x+10^{-15}", "x"): False, (r"e^{\pi\sqrt{163}}", "262537412640768744"): False,
        (r"\sin^2 x + \cos^2 x", "1"): True, (r"\sqrt[4]{x^4}", "x"): False, (r"\tan^2(y)+1", r"\sec^2(y)"): True,
        (r"\frac{n(n+1)(2 n+1)}{6}", r"\frac{2n^3+3n^2+n}{6}"): True, (r"e^{i\pi}", "-1"): True,
        (r"(v/g)^{1/n}", r"v^{1/n}/g^{1/n}"): True, (r"(-1)^n", r"\cos(n\pi)"): True,
        # As many digits as the values have.
        (r"10^{40}\sqrt{2}+1", r"10^{40}\sqrt{2}"): False, (r"2^{200}\pi-1", r"2^{200}\pi"): False,
        (r"3^{2022}\sqrt{3}", r"\sqrt{3}*3^{2022}"): True, (r"3^{2022}\sqrt{3}+1", r"\sqrt{3}*3^{2022}"): False,
        ("2*2^{30000}", "2^{30001}"): True, ("2^{30000}-1", "2^{30000}"): False, ("2023*2022!", "2023!"): True,
        (r"\binom{2023}{1011}", r"\frac{2023!}{1011!*1012!}"): True, (r"\sqrt{2}*2023!", r"2023!*\sqrt{2}+1"): False,
        (r"\frac{1}{2}", r"\frac{1}{3}"): False, ("f(x)", "f(y)"): False, (r"\frac{dy}{dx}", r"\frac{y}{x}"): False,
        ("10^{30}", "10^{30}+1"): False, ("i", "-i"): False, (r"\lceil n/2 \rceil + 1", "2"): False,
        ("I(0)", "0"): False, (r"\ln(x^2)", r"2\ln x"): False, (r"\arctan(\tan x)", "x"): False,
    }  # fmt: skip
    assert {(a, b): equal(a, b) for a, b in verdicts} == verdicts


def test_astronomical_values_are_refused_instead_of_computed() -> None:
    texts = ("10^{10^{10^{10}}}", "9^{9^9}", "10^{-10^{10}}", "100!!!", r"\sin(10^{30})", "1e99999", "x^{10^9}")
    for text in (*texts, "10^{200}10^{200}x"):
        with pytest.raises(TooLarge):
            expressions_equal(parse_expression(text), parse_expression("1"))


def test_equations_are_the_same_up_to_a_factor() -> None:
    signs = {
        ("x-1", "x-1"): 1, ("x-1", "1-x"): -1, ("2x-2", "3x-3"): 1, ("-x/2+y", "x-2y"): -1, ("x-1", "x+1"): 0,
        ("x-1", "y-1"): 0, ("x^2-1", "x-1"): 0, ("ix+i", "x+1"): 1, ("-ix-i", "x+1"): 1, ("x+1", "-ix-i"): 1,
        ("2x+4y-3", "-4x-8y+6"): -1, ("2x+4y-3", "2x+4y-2"): 0,
    }  # fmt: skip
    assert {(a, b): proportional(parse_expression(a), parse_expression(b)) for a, b in signs} == signs


# Equality of structured answers: lists, tuples, sets, intervals, named values, vectors, matrices.


def same_answer(gold: str, answer: str) -> bool | None:
    return answers_equal(parse_answer(clean(gold)), parse_answer(clean(answer)))


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        # Bare lists have no order, tuples have one; a gold in parentheses takes a bare list in its order.
        ("1, 2", ["2, 1", "(1, 2)", r"\{2, 1\}", "b = 1, a = 2"],
         ["1, 3", "1, 2, 3", "(2, 1)", "[1, 2]", "b = 2, a = 1"]),
        ("1, 2, 2", [], ["1, 1, 2", r"\{1, 2\}", "1, 2"]),
        # Of brackets around three values only their order counts, around two they may be an interval.
        ("(1, 2, 3)", ["[1, 2, 3]", "1, 2, 3"], ["[1, 3, 2]"]),
        ("(1, 2)", ["1, 2"], ["(2, 1)", "2, 1", "[1, 2]", r"\{1, 2\}"]),
        # Coordinates of a point by their names.
        ("(2, -1)", ["y = -1, x = 2", "x = 2, y = -1", "n = 2, k = -1", r"\begin{cases} x = 2 \\ y = -1 \end{cases}"],
         ["y = 2, x = -1", "k = 2, n = 1"]),
        # A system is the list of its equations.
        ("x = 1, y = 2", [r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}"],
         [r"\begin{cases} x = 2 \\ y = 1 \end{cases}"]),
        ("[1, 2]", ["[1, 2]"], ["(1, 2)", "1, 2"]),
        # Nor is an interval that is open on one side.
        ("(2, 3]", ["(2, 3]"], ["2, 3", "2 and 3", "x = 2, x = 3", "[2, 3)"]),
        ("(-1, 4]", [], ["x=-1 or x=4"]),
        ("[2, 3)", ["[2, 3)"], ["2, 3", "x = 2, x = 3"]),
        ("2, 3", [], ["(2, 3]", "[2, 3)"]),
        ("x = 2, x = 3", [], ["(2, 3]"]),
        # Sets have no order, and a repeated element counts once; a set is no tuple.
        (r"\{1, 2\}", [r"\{2, 1\}", r"\{1, 2, 2\}", "2, 1"], [r"\{1, 2, 3\}", "(1, 2)", "1, 2, 2", r"\{1\}"]),
        # Lists of solutions: repetitions count once, in any order.
        ("(1, 2), (3, 4)", ["(3, 4), (1, 2)", "(1, 2), (3, 4), (1, 2)"], ["(1, 2), (3, 4), (5, 6)", "(1, 2)"]),
        # One answer against several is the same only where the several are one.
        ("5", [r"\{5\}", "x = 5"], ["5, 6", r"\{6\}", "x = 6", r"\{5, 6\}"]),
        (r"\{5\}", ["5"], []),
        # Names of values are followed where both sides give them.
        ("x = 5", ["5"], ["6", "y = 5"]),
        ("f(x) = 2x", ["y = 2x"], ["y = 3x"]),
        (r"x \approx 0.5", ["0.5"], []),
        ("x < 5", [], ["5"]),
        # Both name their values: by name. Only one does: in the gold's order, but x_1 and x_2 have none.
        ("a = 1, b = 2", ["b = 2, a = 1", "1, 2"], ["a = 2, b = 1", "2, 1", "c = 1, d = 2"]),
        ("x_1 = 1, x_2 = 2", ["2, 1", "y_1 = 2, y_2 = 1"], []),
        ("x = 1, x = 2", ["2, 1", "x = 2, x = 1"], []),
        ("(a, b) = (1, 2)", ["(1, 2)"], []),
        # Names that come again are solutions, in their order.
        ("p = 5, q = 2; p = 7, q = 3", ["(5, 2), (7, 3)"], ["(5, 3), (7, 2)"]),
        ("p = 5, q = 2, p = 7, q = 3", ["5, 2, 7, 3"], ["p = 5, q = 3, p = 7, q = 2", "5, 3, 7, 2"]),
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
        # Unions of letters pair off, and unions of numbers are sets.
        (r"(1, 2) \cup (a, b)", [r"(a, b) \cup (1, 2)"],
         [r"(1, 2) \cup (a, c)", r"(1, 2) \cup (a, b) \cup (3, 4)", "(1, 2)"]),
        ("(1, 2)", [], [r"(1, 2) \cup (a, b)"]),
        (r"(1, 2) \cup (2, 3)", [], ["(1, 3)"]),
        ("1 < x < 3", ["(1, 3)"], []),
        (r"x \in (1, 3)", ["1 < x < 3"], []),
    ],
)  # fmt: skip
def test_answers_are_equal_part_by_part(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: same_answer(gold, answer) for answer in expected} == expected


def test_long_lists_are_compared_in_order_only_and_long_sets_with_repetitions_not_searched_through() -> None:
    upwards = ", ".join(map(str, range(MAX_MATCHED)))
    assert same_answer(upwards, ", ".join(map(str, reversed(range(MAX_MATCHED))))) is True
    assert same_answer(f"{upwards}, 99", f"{upwards}, 99") is True
    assert same_answer(f"00, {upwards}", f"{upwards}, 00") is False
    solutions = [f"({n}, 0)" for n in range(MAX_MATCHED)]
    assert same_answer(", ".join(solutions[1:]), ", ".join([*solutions[1:], "(1, 0)"])) is True
    assert same_answer(", ".join(solutions), ", ".join([*solutions, "(0, 0)"])) is False


def test_an_undecided_part_leaves_the_whole_undecided_unless_another_differs() -> None:
    unreadable, other = r"\int_0^1 \heartsuit", r"\oint \clubsuit"
    assert same_answer(unreadable, other) is None
    assert same_answer(f"(1, {unreadable})", f"(1, {other})") is None
    assert same_answer(f"(1, {unreadable})", f"(2, {other})") is False
    assert same_answer(f"1, {unreadable}", f"1, {other}") is None
