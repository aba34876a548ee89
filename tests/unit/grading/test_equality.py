"""Where expressions, equations and sets of reals are equal: tolerances, domains, factors, ends."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.compare import MAX_MATCHED, relations_equal
from gxpo_trainer.grading.equality import expressions_equal, finite_decimal, proportional, values_equal
from gxpo_trainer.grading.expression import parse_expression
from gxpo_trainer.grading.latex import TooLarge, clean
from gxpo_trainer.grading.realsets import MAX_ENDS, real_sets_equal
from gxpo_trainer.grading.structure import Relation, parse_answer
from gxpo_trainer.grading.units import parse_unit
from gxpo_trainer.grading.verify import within


def equal(a: str, b: str) -> bool:
    verdict = expressions_equal(parse_expression(a), parse_expression(b))
    assert expressions_equal(parse_expression(b), parse_expression(a)) is verdict
    return verdict


@pytest.mark.parametrize(
    ("value", "decimal", "verdict"),
    [
        # One part in 10,000 of the larger, where one is a decimal and the other has no finite decimal form.
        ("200/3", "66.67", True),
        ("200/3", "66.673", True),
        ("200/3", "66.674", False),
        ("200/3", "66.66", True),
        ("200/3", "66.659", False),
        ("-200/3", "-66.67", True),
        ("-200/3", "66.67", False),
        ("1/300", "0.003333", True),
        ("1/300", "0.00333", False),
        ("20/3", "20/3.0001", True),
        ("1/4", "0.25", True),
        ("1/4", "0.25001", False),
        ("1/3", "333/1000", False),
        (r"\sqrt{2}", "1.4142", True),
        (r"\sqrt{2}", "1.414", False),
        (r"100\sqrt{2}", "141.42", True),
        (r"100\sqrt{2}", "141.4", False),
        (r"\sqrt{2}", r"\frac{14142}{10000}", False),
        (r"\pi", "3.1416", True),
        (r"\pi", "3.14", False),
        (r"\pi x", "3.1416x", True),
        (r"\pi x", "3.14x", False),
        ("1e-30", "2e-30", False),
        ("10^{-30}x", "2 10^{-30}x".replace("2 ", "2*"), False),
    ],
)
def test_decimals_stand_for_values_without_a_finite_form(value: str, decimal: str, verdict: bool) -> None:
    assert equal(value, decimal) is verdict


def test_the_tolerance_is_relative_to_the_larger_value_and_includes_its_bound() -> None:
    third = Fraction(1, 3)
    assert values_equal(third, third * Fraction(9999, 10_000), decimal=True)
    assert not values_equal(third, third * Fraction(9998, 10_000), decimal=True)
    assert values_equal(third * 200, third * Fraction(19_998, 100), decimal=True)
    assert values_equal(-third, -third * Fraction(9999, 10_000), decimal=True)
    assert not values_equal(Fraction(1, 4), Fraction(2500001, 10_000_000), decimal=True)
    assert [finite_decimal(Fraction(1, n)) for n in range(1, 11)] == [
        True, True, False, True, True, False, False, True, False, True,
    ]  # fmt: skip
    assert finite_decimal(Fraction(1, 2**100))
    assert finite_decimal(Fraction(1, 5**100))


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        # Differences far from 0, between constants, near 0, and of either sign.
        ("|x-3|", "x-3", False),
        ("|x+3|", "x+3", False),
        ("|x-1000|+|x+1000|", "2000", False),
        ("|x-0.001|", "0.001-x", False),
        (r"\max(x, 50000)", "50000", False),
        (r"\min(x, -5)", "-5", False),
        ("|x-1|+|x-1.01|", "2*|x-1.005|", False),
        (r"|x-\frac{\pi}{100}|+|x-\frac{\pi}{40}|", r"2*|x-\frac{7\pi}{400}|", False),
        (r"\sqrt{(x-7)^2}", "|x-7|", True),
        (r"\sqrt{x^2}\sqrt{y^2}", "|xy|", True),
        (r"\sqrt{x^2}\sqrt{y^2}", "xy", False),
        (r"\ln(x^2)", r"2\ln|x|", True),
        ("|x|-|y|", "|x-y|", False),
        (r"\max(x, y)", r"\frac{x+y+|x-y|}{2}", True),
        (r"\min(x, y)", r"\frac{x+y+|x-y|}{2}", False),
        (r"\lfloor x \rfloor", "x", False),
        (r"\lceil x \rceil", r"-\lfloor -x \rfloor", True),
        (r"\lfloor x \rfloor + 1", r"\lceil x \rceil", False),
        ("(-1)^{2n}", "1", True),
        ("(-1)^{n+1}", "-(-1)^n", True),
        ("(-1)^n", "1", False),
        ("(-2)^n", "2^n", False),
        ("n!/(n-1)!", "n", True),
        # Two sides that are nowhere defined together, and one that is nowhere defined.
        (r"\sqrt{-1-x^2}", r"i\sqrt{1+x^2}", True),
        (r"\sqrt{-4}", "2i", True),
        (r"\sqrt{-4}\sqrt{-9}", "-6", True),
        (r"\sqrt{-4}", "-2i", False),
        (r"\ln(-1)", r"i\pi", True),
        ("1/0", "1/0", False),
        ("x/0", "x/0", False),
        ("1/0", "1", False),
        (r"\sqrt{x}", r"\sqrt{|x|}", False),
        (r"\frac{x^2-1}{x-1}", "x+1", True),
        ("x", "y", False),
        ("x-x", "0", True),
        ("f(x)-f(x)", "0", True),
        ("x^{10}+10^{-12}", "x^{10}", False),
        ("x+10^{-15}", "x", False),
        (r"e^{\pi\sqrt{163}}", "262537412640768744", False),
        (r"\sin^2 x + \cos^2 x", "1", True),
        (r"\sin 2x", r"2\sin x\cos x", True),
        ("2^{x+3}", "8*2^x", True),
        ("x^{1/3}", r"\sqrt[3]{x}", True),
        (r"\sqrt[3]{x^3}", "x", True),
        (r"\sqrt[4]{x^4}", "x", False),
    ],
)
def test_expressions_are_equal_as_functions(a: str, b: str, verdict: bool) -> None:
    assert equal(a, b) is verdict


def test_values_beyond_every_point_are_refused() -> None:
    with pytest.raises(TooLarge):
        equal("x^{10^9}", "0")
    with pytest.raises(TooLarge):
        equal("10^{200}10^{200}x", "1")


@pytest.mark.parametrize(
    ("a", "b", "sign"),
    [
        ("x-1", "x-1", 1),
        ("x-1", "1-x", -1),
        ("2x-2", "3x-3", 1),
        ("-x/2+y", "x-2y", -1),
        ("x-1", "x+1", 0),
        ("x-1", "y-1", 0),
        ("x^2-1", "x-1", 0),
        ("ix+i", "x+1", 1),
        ("-ix-i", "x+1", 1),
        ("x+1", "-ix-i", 1),
    ],
)
def test_equations_are_the_same_up_to_a_factor(a: str, b: str, sign: int) -> None:
    assert proportional(parse_expression(a), parse_expression(b)) == sign


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("2x + y = 3", "4x + 2y = 6", True),
        ("2x + y = 3", "-2x - y = -3", True),
        ("2x + y = 3", "y = 3 - 2x", True),
        ("2x + y = 3", "y = 3 + 2x", False),
        ("x + y < 3", "-x - y > -3", True),
        ("x + y < 3", "3 > x + y", True),
        ("x + y < 3", "2x + 2y < 6", True),
        ("x + y < 3", "x + y > 3", False),
        ("x + y < 3", "-x - y < -3", False),
        ("x + y < 3", r"x + y \le 3", False),
        (r"x + y \le 3", r"-x - y \ge -3", True),
        (r"x + y \ne 3", r"3 - x - y \ne 0", True),
        (r"x + y \ne 3", "x + y = 3", False),
        ("a < b < c", "c > b > a", True),
        ("a < b < c", "a < c < b", False),
        ("a < b < c", r"a < b \le c", False),
        ("a = b = c", "a = b", None),
    ],
)
def test_relations_are_equal_as_conditions(gold: str, answer: str, verdict: bool | None) -> None:
    a, b = parse_answer(gold), parse_answer(answer)
    assert isinstance(a, Relation)
    assert isinstance(b, Relation)
    assert relations_equal(a, b) is verdict


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("x > 2", r"(2, \infty)", True),
        ("x > 2", r"[2, \infty)", False),
        ("x > 2", "2 < x", True),
        ("x > 2", "-x < -2", True),
        (r"x \ge 2", r"[2, \infty)", True),
        (r"x \le 2", r"(-\infty, 2]", True),
        ("0 < x < 1", "(0, 1)", True),
        ("0 < x < 1", "1 > x > 0", True),
        ("x < 1, x > 3", r"(-\infty, 1) \cup (3, \infty)", True),
        ("x < 1, x > 3", "(1, 3)", False),
        ("x < 1, y > 3", r"(-\infty, 1) \cup (3, \infty)", None),
        (r"x \in [1, 2)", "[1, 2)", True),
        (r"x \in \{1, 2\}", r"[1, 1] \cup [2, 2]", True),
        (r"x \in [1, 2)", "(1, 2)", False),
        ("[1, 2)", "1, 2", False),
        ("[1, 2)", "(2, 1)", None),
        ("[1, 2)", "(1, 2, 3)", None),
        ("[1, 1]", "(1, 1)", None),
        (r"[1, 2) \cup \{2\}", r"[1, 2) \cup [2, 2]", True),
        (r"[1, 2) \cup \{2\}", r"[1, 2) \cup (2, 3)", False),
        (r"\mathbb{R} \setminus \{0\}", r"x \ne 0", True),
        (r"\mathbb{R} \setminus \{0\}", r"(-\infty, 0) \cup (0, \infty)", True),
        (r"\mathbb{R} \setminus \{0, 1\}", r"x \ne 0", False),
        (r"\mathbb{R} - \{0\}", r"x \ne 0", True),
        (r"\mathbb{R} \setminus \{0\}", r"x = 0, x > 5", False),
        (r"\{0\} \cup (5, \infty)", r"x = 0, x > 5", True),
        (r"(-\infty, \infty)", r"\mathbb{R}", True),
        (r"(-\infty, \infty)", r"\text{all real numbers}", True),
        (r"(1, 2) \cup (3, 4)", r"(1, 4)", False),
        (r"(1, 2) \cup (3, 4)", r"(3, 4) \cup (1, 2)", True),
        ("|x| < 0", r"\emptyset", True),
        (r"|x| \ge 0", r"\mathbb{R}", True),
        ("|x| > 100000", r"x > 100000, x < -100000", True),
        ("|2x - 1| < 5", "(-2, 3)", True),
        ("||x| - 1| < 1", r"(-2, 0) \cup (0, 2)", True),
        ("||x| - 1| < 1", "(-2, 2)", False),
        (r"|x - 1| < |x - 3|", "x < 2", True),
        (r"|x - 1| + |x - 3| \le 2", "[1, 3]", True),
        # x < 2 and x < 2.05.
        ("3x < x + 4", "3x < x + 4.1", False),
        (r"x \ne 2, x \ne 3", r"\mathbb{R}", True),
        (r"\frac{x}{3} < \frac{1}{9}", r"(-\infty, 1/3)", True),
        (r"\sqrt{2} < x < \pi", r"(\sqrt{2}, \pi)", True),
        (r"\sqrt{2} < x < \pi", "(1.5, 3)", False),
        ("x < 1e-3", r"(-\infty, 0.001)", True),
        ("x < 1000000", r"(-\infty, 1000001)", False),
        ("1/x < 2", "[0, 1)", None),
        (r"f(x) > 2", r"(2, \infty)", True),
        ("f(2) > 2", "[0, 1)", None),
        (r"x \equiv 2", "[0, 1)", None),
    ],
)
def test_sets_of_reals_are_equal_where_they_hold_the_same_numbers(gold: str, answer: str, verdict: bool | None) -> None:
    a, b = parse_answer(clean(gold)), parse_answer(clean(answer))
    assert real_sets_equal(a, b) is verdict
    assert real_sets_equal(b, a) is verdict


def test_the_pieces_of_an_inequality_are_bounded() -> None:
    few, many = ("+".join(f"|x-{n}|" for n in range(count)) for count in (MAX_ENDS, MAX_ENDS + 1))
    assert real_sets_equal(parse_answer(f"{few} < 0"), parse_answer("(1, 2]")) is False
    assert real_sets_equal(parse_answer(f"{many} < 0"), parse_answer("(1, 2]")) is None


def close(gold: str, answer: str, *tolerance: float, unit: str | None = None) -> bool:
    known = parse_unit(unit) if unit else None
    return within(parse_answer(clean(gold)), parse_answer(clean(answer)), tolerance, known)


@pytest.mark.parametrize(
    ("gold", "answer", "tolerance", "verdict"),
    [
        ("10", "10.1", [0.1], True),
        ("10", "9.9", [0.1], True),
        ("10", "10.11", [0.1], False),
        ("10", "9.89", [0.1], False),
        ("10", "-10", [0.1], False),
        ("x = 10", "10.1", [0.1], True),
        ("10", "x = 10.1", [0.1], True),
        (r"\sqrt{2}", "1.41", [0.01], True),
        (r"\sqrt{2}", "1.40", [0.01], False),
        ("1.41", r"\sqrt{2}", [0.01], True),
        ("10, 20", "20.1, 10.1", [0.1], True),
        ("10, 20", "10.1, 20.2", [0.1], False),
        ("10, 20", "10.1, 20.2", [0.1, 0.2], True),
        ("10, 20", "10.2, 20.1", [0.1, 0.2], False),
        ("10, 20", "20.2, 10.1", [0.1, 0.2], True),
        ("10, 20, 30", "10.2, 20, 30", [0.1, 0.2], False),
        ("10, 20", "10.1, 20.1", [0.1, 0.2, 0.3], True),
        ("10, 20", "10.1, 20.2", [0.1, 0.2, 0.3], False),
        ("10, 20", "10, 10", [0.1], False),
        ("10, 20", "10", [0.1], False),
        ("10", "10, 20", [0.1], False),
        ("10", "10i", [0.1], False),
        ("10", "x", [0.1], False),
        ("10", "1/0", [0.1], False),
        ("10, x", "10, x", [0.1], False),
        ("10", "a < 10", [0.1], False),
    ],
)
def test_numbers_may_differ_by_a_stated_tolerance(
    gold: str, answer: str, tolerance: list[float], verdict: bool
) -> None:
    assert close(gold, answer, *tolerance) is verdict


def test_a_tolerance_counts_in_the_unit_of_the_gold() -> None:
    assert close("5", r"5.1 \text{ km}", 0.1, unit="km")
    assert close("5", r"5100 \text{ m}", 0.1, unit="km")
    assert not close("5", r"5101 \text{ m}", 0.1, unit="km")
    assert not close("5", r"5 \text{ m}", 0.1, unit="km")
    assert not close("5", r"5 \text{ kg}", 0.1, unit="km")
    # 5000 m are no speed, though 5000 m/s are 18,000 km/h.
    assert close("18000", r"5000 \text{ m/s}", 0.1, unit="km/h")
    assert not close("18000", r"5000 \text{ m}", 0.1, unit="km/h")
    assert close("5", "5.1", 0.1, unit="km")
    assert close("5", r"5.1 \text{ km}", 0.1)


def test_as_many_values_are_paired_as_lists_are_matched() -> None:
    def listed(count: int) -> str:
        return ", ".join(str(10 * n) for n in range(count))

    assert close(listed(MAX_MATCHED), listed(MAX_MATCHED), 0.1)
    assert not close(listed(MAX_MATCHED + 1), listed(MAX_MATCHED + 1), 0.1)
