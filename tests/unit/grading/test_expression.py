"""The expression grammar, by the exact values of what it reads, and values at points."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest

from gxpo_trainer.grading.equality import (
    MAX_BITS,
    MAX_FACTORIAL,
    MAX_LOG,
    Undefined,
    are_real,
    precise,
    rational_value,
    substituted,
    symbols,
    value_at,
)
from gxpo_trainer.grading.expression import MAX_DEPTH, MAX_EXPONENT, Node, number, parse_expression
from gxpo_trainer.grading.latex import MAX_TOKENS, TooLarge, Unsupported, tokenize

X, Y = Node("sym", name="x"), Node("sym", name="y")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", "14"), ("(2+3)*4", "20"), ("10-4-3", "3"), ("10-(4-3)", "9"), ("--2", "2"), ("2*-3", "-6"),
        (r"6\times 7", "42"), (r"6\cdot 7", "42"), (r"7\div 2", "7/2"), ("12/2/3", "2"), ("2(3)(4)", "24"),
        ("6/2(3)", "9"), ("-2^2", "-4"), ("(-2)^2", "4"), ("2^{-3}", "1/8"), ("2^-3", "1/8"), ("2^{3}5", "40"),
        ("2^35", "34359738368"), ("10^-12", "1/1000000000000"),
        ("2^3^2", "512"), ("2^{2^3}", "256"), (r"\frac{3}{4}", "3/4"), (r"\frac34", "3/4"),
        (r"\frac345", "15/4"), (r"\frac{1}{2}3", "3/2"), (r"\frac-12", "-1/2"), (r"2\frac{1}{3}", "7/3"),
        (r"2\frac{4}{3}", "8/3"), (r"0.5\frac{1}{3}", "1/6"), (r"2\frac{1.5}{3}", "1"), (r"2\frac{1}{2.5}", "4/5"),
        (r"2(\frac{1}{3})", "2/3"), (r"-2\frac{1}{3}", "-7/3"), ("5!", "120"), ("6!!", "48"), ("2^{3!}", "64"),
        (r"\binom{6}{2}", "15"), ("|-3|", "3"), ("|2-5|+1", "4"), (r"\lfloor -2.5 \rfloor", "-3"),
        (r"\lceil -2.5 \rceil", "-2"), (r"\max(3, 7, 5)", "7"), (r"\min(3, -7, 5)", "-7"), ("1.25", "5/4"),
        (".5", "1/2"), ("1,234", "1234"), ("1{,}234", "1234"), ("1,234,567.5", "2469135/2"), ("1e3", "1000"),
        ("2.5E-2", "1/40"), ("{5}", "5"), ("0^2", "0"), ("0^{0.5}", None), ("(-1)^{-7}", "-1"),
        ("(-1)^{123456789123456789}", "-1"), ("4^{1/2}", None), (r"\sqrt{4}", None), (r"\pi", None), ("e", None),
        ("f(1)", None), (r"(\frac{2}{3})^3", "8/27"), (r"(\frac{2}{3})^{-2}", "9/4"),
    ],
)  # fmt: skip
def test_rational_constants_have_their_exact_value(text: str, value: str | None) -> None:
    assert rational_value(parse_expression(text)) == (None if value is None else Fraction(value))
    for undefined in ("1/0", "0^0", "0^{-1}", r"\frac{1}{1-1}", r"\binom{2}{3}/0", "x"):
        with pytest.raises(Undefined):
            rational_value(parse_expression(undefined))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # At x = 2, y = 3.
        ("xy", 6.0), ("2xy^2", 36.0), ("x/yx", 4 / 3), (r"\sqrt{xy+3}", 3.0), (r"\sqrt[3]{8}", 2.0),
        (r"\sqrt[y]{x}", 2 ** (1 / 3)), (r"\sqrt2x", 2 * 2**0.5), (r"\sin x", math.sin(2)), (r"\sin 2x", math.sin(4)),
        (r"\sin -x", math.sin(-2)), (r"\sin x + y", math.sin(2) + 3), (r"\sin(x) y", 3 * math.sin(2)),
        (r"\sin{x}y", 3 * math.sin(2)), (r"\sin x \cos y", math.sin(2) * math.cos(3)),
        (r"\sin x\sqrt{y}", math.sin(2 * 3**0.5)), (r"\sin^2 x", math.sin(2) ** 2), (r"\tan^{-1} x", math.atan(2)),
        (r"\cosh^{-1} x", math.acosh(2)), (r"\ln x", math.log(2)), (r"\log x", math.log10(2)),
        (r"\lg x", math.log10(2)), (r"\log_y x", math.log(2, 3)), (r"\log_{y}(x)", math.log(2, 3)),
        (r"\log_2^2 (x)", 1.0), (r"\log(x) y", 3 * math.log10(2)), (r"\exp(x)", math.exp(2)), ("e^x", math.exp(2)),
        (r"\arcsin(x/4)", math.asin(0.5)), (r"\arctan y", math.atan(3)), (r"\arsinh x", math.asinh(2)),
        (r"\arcosh x", math.acosh(2)), (r"\artanh(x/4)", math.atanh(0.5)), (r"\sinh x", math.sinh(2)),
        (r"\sec x", 1 / math.cos(2)), (r"\cot x", 1 / math.tan(2)), (r"90^\circ x", math.pi), ("x!", 2.0),
        ("5!!x", 30.0), (r"\binom{5}{x}", 10.0), (r"\max(x, y)", 3.0), (r"\lfloor x/y \rfloor", 0.0),
        (r"\lceil x/y \rceil", 1.0), ("|x-y|", 1.0), ("(-8)^{1/y}", None), ("(x-2)^y", 0.0), ("(x-2)^{1/2}", 0.0),
        ("(x-2)^{-y}", None), ("(x-2)^0", None), ("(x-y)^3", -1.0), ("(x-y)^{3/2}", None), (r"\sqrt{x-y}", None),
        (r"\ln(x-y)", None), (r"\ln(x-2)", None), (r"\arcsin y", None), (r"\arcosh(x-y)", None), (r"\artanh y", None),
        (r"\arccos(x-y)", math.pi), (r"\arcsin(x-1)", math.pi / 2),
    ],
)  # fmt: skip
def test_expressions_have_their_value_at_a_point(text: str, value: float | None) -> None:
    def point(name: str) -> Fraction:
        return {"x": Fraction(2), "y": Fraction(3)}[name]

    node = parse_expression(text)
    if value is None:
        with pytest.raises(Undefined):
            value_at(node, mpmath.fp, point, real=True)
        return
    assert float(value_at(node, mpmath.fp, point, real=True)) == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert float(value_at(node, precise(), point, real=True)) == pytest.approx(value, rel=1e-14, abs=1e-14)


def test_outside_the_reals_roots_and_logarithms_of_negative_numbers_have_their_principal_value() -> None:
    def at(text: str) -> complex:
        return complex(value_at(parse_expression(text), mpmath.fp, lambda name: Fraction(-4), real=False))

    assert at(r"\sqrt{x}") == pytest.approx(2j)
    assert at("x^{1/2}") == pytest.approx(2j)
    assert at(r"\ln x") == pytest.approx(complex(math.log(4), math.pi))
    assert at("(-8)^{1/3}") == pytest.approx(complex(1, 3**0.5))
    assert at(r"2\cis \frac{\pi}{3}") == pytest.approx(complex(1, 3**0.5))
    assert at(r"\arcsin x").imag != 0
    assert at("i^2") == pytest.approx(-1)
    # A function that is not known is the same for the same name and argument.
    assert at("f(x)") == at("f(x)")
    assert at("f(x)") != pytest.approx(at("g(x)"))
    assert at("f(x)") != pytest.approx(at("f(2x)"))
    assert at("f(x, 2x)") != pytest.approx(at("f(2x, x)"))
    assert at("f(x, x)") != pytest.approx(at("f(x)"))


def test_each_form_is_read_as_one_tree() -> None:
    nodes = {
        "x_1": Node("sym", name="x_1"), "x_{12}": Node("sym", name="x_12"),
        "x_{a_{1}}": Node("sym", name="x_a_{1}"), "x'": Node("sym", name="x'"), "x_1'": Node("sym", name="x_1'"),
        "e": Node("const", name="e"), "i": Node("const", name="i"), r"\alpha_2": Node("sym", name=r"\alpha_2"),
        r"\dot{x}": Node("sym", name="dot x"), r"\bar x": Node("sym", name="bar x"),
        r"\bar{x}_1": Node("sym", name="bar x_1"), "f(x)": Node("apply", (X,), "f"),
        "f_1(x, y)": Node("apply", (X, Y), "f_1"), "x(t)": Node("apply", (Node("sym", name="t"),), "x"),
        "x(3)": Node("apply", (number(3),), "x"), "x(3y)": Node("mul", (X, Node("mul", (number(3), Y)))),
        r"\frac{dy}{dx}": Node("sym", name="{dy}{dx}"), r"\frac{d}{dx}": Node("sym", name="{d}{dx}"),
        r"\frac{d}{2}": Node("div", (Node("sym", name="d"), number(2))),
        r"\vec{x}\times\vec{y}": Node("apply", (Node("sym", name="vec x"), Node("sym", name="vec y")), r"\times"),
        r"\vec{x}\cdot\vec{y}": Node("mul", (Node("sym", name="vec x"), Node("sym", name="vec y"))),
        r"x\times\vec{y}": Node("mul", (X, Node("sym", name="vec y"))),
    }  # fmt: skip
    assert {text: parse_expression(text) for text in nodes} == nodes


def test_other_texts_are_outside_the_grammar() -> None:
    texts = [
        "", "2+", "*2", "2 3", "2 .5", "(2", "2)", "(2]", "(2#", r"\ln(2, 3)", "|2", r"\frac{1}", r"\sqrt[3{2}", "x_",
        "x_{1", r"\nosuch", "x = 2", "x < 2", "1, 2", "#", "é", r"\sin x/2", r"\sin", r"\max 3", r"\sum_{k=1}^n k",
        "(" * 500 + ")" * 500, r"\ln(" * 400 + "x" + ")" * 400,
    ]  # fmt: skip
    for text in texts:
        with pytest.raises(Unsupported):
            parse_expression(text)


def test_nesting_and_length_are_bounded() -> None:
    inside = MAX_DEPTH - 1
    assert rational_value(parse_expression("(" * inside + "7" + ")" * inside)) == 7
    with pytest.raises(Unsupported):
        parse_expression("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH)
    # Brackets side by side are not nested.
    assert rational_value(parse_expression("(1)" * 200)) == 1
    towers = "1" + "^1" * (MAX_DEPTH - 1)
    assert rational_value(parse_expression(towers)) == 1
    with pytest.raises(Unsupported):
        parse_expression(towers + "^1")
    assert len(tokenize("+" * MAX_TOKENS)) == MAX_TOKENS
    with pytest.raises(Unsupported):
        tokenize("+" * (MAX_TOKENS + 1))


def test_magnitudes_are_bounded() -> None:
    assert rational_value(parse_expression(f"1e{MAX_EXPONENT // 4}")) == Fraction(10) ** (MAX_EXPONENT // 4)
    assert parse_expression(f"1e{MAX_EXPONENT}").value == Fraction(10) ** MAX_EXPONENT
    assert parse_expression(f"1e-{MAX_EXPONENT}").value == Fraction(1, 10**MAX_EXPONENT)
    for text in (f"1e{MAX_EXPONENT + 1}", f"1e-{MAX_EXPONENT + 1}"):
        with pytest.raises(TooLarge):
            parse_expression(text)
    # 2 has 2 bits, so that the largest exact power of it is the half of MAX_BITS.
    assert rational_value(parse_expression(f"2^{{{MAX_BITS // 2}}}")) == 2 ** (MAX_BITS // 2)
    assert rational_value(parse_expression(f"2^{{{MAX_BITS // 2 + 1}}}")) is None
    assert rational_value(parse_expression(f"2^{{-{MAX_BITS // 2 + 1}}}")) is None
    with pytest.raises(TooLarge):
        rational_value(parse_expression(f"2^{{{MAX_BITS // 2}}}" * 2))
    assert rational_value(parse_expression(f"{MAX_FACTORIAL}!/{MAX_FACTORIAL}!")) == 1
    assert rational_value(parse_expression(f"{MAX_FACTORIAL + 1}!")) is None
    assert rational_value(parse_expression("(-1)!")) is None
    assert rational_value(parse_expression("1.5!")) is None


@pytest.mark.parametrize(
    ("text", "bound"),
    [(r"e^{x}", MAX_LOG), (r"\exp(x)", MAX_LOG), (r"\sin(x)", 10**9), (r"\tanh(x)", 10**9), ("x!/x!", 10**6)],
)
def test_functions_are_computed_for_arguments_up_to_their_bound(text: str, bound: float) -> None:
    node = parse_expression(text)

    def at(x: Fraction) -> object:
        return value_at(node, precise(), lambda name: x, real=True)

    assert abs(at(Fraction(bound))) > 0  # type: ignore[arg-type]
    for beyond in (Fraction(bound) + Fraction(1, 2), -Fraction(bound) - Fraction(1, 2)):
        with pytest.raises(TooLarge):
            at(beyond)


def test_parts_of_an_expression_are_named() -> None:
    node = parse_expression(r"x_1 + \alpha f(y) + \sin \pi")
    assert symbols(node) == {"x_1", r"\alpha", "f()", "y"}
    assert symbols(substituted(node, {"y": number(2), "x_1": X})) == {"x", r"\alpha", "f()"}
    real, imaginary = (parse_expression(text) for text in (r"e^2 + \sin 3", "2 + 3i"))
    assert are_real(real)
    assert not are_real(imaginary)
    assert not are_real(real, parse_expression(r"\cis 3"))
