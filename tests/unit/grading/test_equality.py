"""Where expressions are equal: tolerances, domains, factors."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.equality import expressions_equal, finite_decimal, proportional, values_equal
from gxpo_trainer.grading.expression import parse_expression
from gxpo_trainer.grading.latex import TooLarge


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


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        # Differences far from 0, between constants, near 0, and of either sign.
        ("|x-3|", "x-3", False), ("|x+3|", "x+3", False), ("|x-1000|+|x+1000|", "2000", False),
        ("|x-0.001|", "0.001-x", False), (r"\max(x, 50000)", "50000", False), (r"\min(x, -5)", "-5", False),
        ("|x-1|+|x-1.01|", "2*|x-1.005|", False),
        (r"|x-\frac{\pi}{100}|+|x-\frac{\pi}{40}|", r"2*|x-\frac{7\pi}{400}|", False),
        (r"\sqrt{(x-7)^2}", "|x-7|", True), (r"\sqrt{x^2}\sqrt{y^2}", "|xy|", True),
        (r"\sqrt{x^2}\sqrt{y^2}", "xy", False), (r"\ln(x^2)", r"2\ln|x|", True), ("|x|-|y|", "|x-y|", False),
        (r"\max(x, y)", r"\frac{x+y+|x-y|}{2}", True), (r"\min(x, y)", r"\frac{x+y+|x-y|}{2}", False),
        (r"\lfloor x \rfloor", "x", False), (r"\lceil x \rceil", r"-\lfloor -x \rfloor", True),
        (r"\lfloor x \rfloor + 1", r"\lceil x \rceil", False), ("(-1)^{2n}", "1", True),
        ("(-1)^{n+1}", "-(-1)^n", True), ("(-1)^n", "1", False), ("(-2)^n", "2^n", False), ("n!/(n-1)!", "n", True),
        # Two sides that are nowhere defined together, and one that is nowhere defined.
        (r"\sqrt{-1-x^2}", r"i\sqrt{1+x^2}", True), (r"\sqrt{-4}", "2i", True), (r"\sqrt{-4}\sqrt{-9}", "-6", True),
        (r"\sqrt{-4}", "-2i", False), (r"\ln(-1)", r"i\pi", True), ("1/0", "1/0", False), ("x/0", "x/0", False),
        ("1/0", "1", False), (r"\sqrt{x}", r"\sqrt{|x|}", False), (r"\frac{x^2-1}{x-1}", "x+1", True),
        ("x", "y", False), ("x-x", "0", True), ("f(x)-f(x)", "0", True), ("x^{10}+10^{-12}", "x^{10}", False),
        ("x+10^{-15}", "x", False), (r"e^{\pi\sqrt{163}}", "262537412640768744", False),
        (r"\sin^2 x + \cos^2 x", "1", True), (r"\sin 2x", r"2\sin x\cos x", True), ("2^{x+3}", "8*2^x", True),
        ("x^{1/3}", r"\sqrt[3]{x}", True), (r"\sqrt[3]{x^3}", "x", True), (r"\sqrt[4]{x^4}", "x", False),
        ("(r+5)^2", "r^2+10r+25", True), (r"\tan^2(y)+1", r"\sec^2(y)", True),
        (r"\frac{5\sqrt{42}}{27}", r"\frac{10\sqrt{10.5}}{27}", True),
        (r"\frac{n(n+1)(2 n+1)}{6}", r"\frac{2n^3+3n^2+n}{6}", True), (r"e^{-2t}/3", r"\frac{1}{3e^{2t}}", True),
        (r"\sqrt[3]{-8}", "-2", True), (r"\log_2 8", "3", True), (r"\binom{5}{2}", "5!/12", True),
        (r"e^{i\pi}", "-1", True), (r"2\frac{1}{3}", r"\frac{7}{3}", True), (r"\tan 45^\circ", "1", True),
        (r"\arsinh x", r"\ln(x+\sqrt{x^2+1})", True), (r"\arcosh x", r"\ln(x+\sqrt{x^2-1})", True),
        (r"\artanh x", r"\frac{1}{2}\ln\frac{1+x}{1-x}", True), (r"\arcsec x", r"\arccos(1/x)", True),
        (r"\sqrt{1-x^2}", r"(1-x^2)^{1/2}", True), ("9!!", "945", True), (r"\max(3, 7)", "7", True),
        (r"2\cis \frac{\pi}{3}", r"1+\sqrt{3}i", True), (r"(-8)^{1/3}", "-2", True),
        (r"\frac{|x|+x}{2}", r"\max(x,0)", True), (r"(v/g)^{1/n}", r"v^{1/n}/g^{1/n}", True),
        (r"(-1)^n", r"\cos(n\pi)", True), (r"\frac{1}{2}", r"\frac{1}{3}", False),
        ("f(x)", "f(y)", False), ("f(x+y)", "f(x)+f(y)", False), (r"\frac{dy}{dx}", r"\frac{y}{x}", False),
        ("2^{100}", "2^{101}", False), ("10^{30}", "10^{30}+1", False), ("n!", "n", False), ("i", "-i", False),
        (r"\lceil n/2 \rceil + 1", "2", False), ("I(0)", "0", False), (r"\ln(x^2)", r"2\ln x", False),
        ("|x|+|y|", "|x+y|", False), (r"\arctan(\tan x)", "x", False), (r"2^{n}-1", r"2^{n-1}", False),
        (r"\frac{35}{2}\pi", r"\frac{35}{2\pi}", False), (r"\sqrt{2}x", r"\sqrt{2x}", False),
    ],
)  # fmt: skip
def test_expressions_are_equal_as_functions(a: str, b: str, verdict: bool) -> None:
    assert equal(a, b) is verdict


@pytest.mark.parametrize(
    "text", ["10^{10^{10^{10}}}", "9^{9^9}", "10^{-10^{10}}", "100!!!", r"\sin(10^{30})", "1e99999"]
)
def test_astronomical_values_are_refused_instead_of_computed(text: str) -> None:
    with pytest.raises(TooLarge):
        expressions_equal(parse_expression(text), parse_expression("0"))


def test_values_beyond_every_point_are_refused() -> None:
    with pytest.raises(TooLarge):
        equal("x^{10^9}", "0")
    with pytest.raises(TooLarge):
        equal("10^{200}10^{200}x", "1")


@pytest.mark.parametrize(
    ("a", "b", "sign"),
    [
        ("x-1", "x-1", 1), ("x-1", "1-x", -1), ("2x-2", "3x-3", 1), ("-x/2+y", "x-2y", -1), ("x-1", "x+1", 0),
        ("x-1", "y-1", 0), ("x^2-1", "x-1", 0), ("ix+i", "x+1", 1), ("-ix-i", "x+1", 1), ("x+1", "-ix-i", 1),
        ("2x+4y-3", "-4x-8y+6", -1), ("2x+4y-3", "2x+4y-2", 0),
    ],
)  # fmt: skip
def test_equations_are_the_same_up_to_a_factor(a: str, b: str, sign: int) -> None:
    assert proportional(parse_expression(a), parse_expression(b)) == sign
