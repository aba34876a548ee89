"""Answers against golds: each quirk of spelling by its own function, and the verdicts that follow."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from gxpo_trainer.verify.exact import Number, finite_decimal, numbers_equal, read_number

from gxpo_trainer.verify import normalize as n
from gxpo_trainer.verify.evaluate import TooLarge, expressions_equal, proportional
from gxpo_trainer.verify.expression import Unsupported, parse_expression
from gxpo_trainer.verify.math import parse_gold, verify
from gxpo_trainer.verify.realsets import Piece, pieces_of
from gxpo_trainer.verify.structure import parse_answer
from gxpo_trainer.verify.units import drop_units

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("1,234,567", 1234567),
        ("14{,}916", 14916),
        (r"11,\! 111,\! 100", 11111100),
        ("1 000", 1000),
        ("0.50", HALF),
        (".5", HALF),
        ("1/2", HALF),
        (r"-\frac{1}{2}", -HALF),
        (r"\frac12", HALF),
        (r"\dfrac {1}{2}", HALF),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        ("3 1/2", Fraction(7, 2)),
        ("4.5e33", 45 * Fraction(10) ** 32),
        (r"4.5 \times 10^{33}", 45 * Fraction(10) ** 32),
        (r"1.2 \cdot 10^{-3}", Fraction(12, 10000)),
        (r"\$18.90", Fraction(189, 10)),
        ("−4", -4),
    ],
)
def test_plain_numbers_are_read_exactly(text: str, value: Fraction | int) -> None:
    number = read_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize("text", ["", "x", "32, 349", "1 2", "2x", r"\sqrt{2}", "1/0", "12:00", "1e99999", "1,22", "٣"])
def test_what_is_no_plain_number_is_left_to_others(text: str) -> None:
    assert read_number(text) is None


def test_percent_reads_as_the_number_and_as_its_hundredth() -> None:
    ten_percent = read_number(r"10\%")
    assert ten_percent is not None
    assert numbers_equal(ten_percent, Number(Fraction(10)))
    assert numbers_equal(ten_percent, Number(Fraction(1, 10)))
    assert not numbers_equal(ten_percent, Number(Fraction(1, 100)))
    assert not numbers_equal(Number(Fraction(10)), Number(Fraction(1, 10)))


def test_decimal_tolerance_is_one_part_in_10000_and_only_for_values_without_a_finite_decimal() -> None:
    third = Number(Fraction(1, 3))
    assert numbers_equal(third, Number(Fraction(3333, 10000), decimal=True))
    assert not numbers_equal(third, Number(Fraction(333, 1000), decimal=True))
    assert not numbers_equal(Number(Fraction(5)), Number(Fraction(500001, 100000), decimal=True))
    assert finite_decimal(Fraction(7, 80))
    assert not finite_decimal(Fraction(1, 6))


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (n.unicode_to_latex, "½", r"\frac{1}{2}"),
        (n.unicode_to_latex, "x²", "x^{2}"),
        (n.unicode_to_latex, "3√2", r"3\sqrt{2}"),
        (n.unicode_to_latex, "≤", r"\le "),
        (n.math_delimiters, r"$5$", " 5 "),
        (n.math_delimiters, r"\(5\)", " 5 "),
        (n.math_delimiters, r"\$5", r"\$5"),
        (n.emphasis, "**B**", "B"),
        (n.double_backslashes, r"\\frac{1}{2}", r"\frac{1}{2}"),
        (n.double_backslashes, r"\begin{matrix}1\\a\end{matrix}", r"\begin{matrix}1\\a\end{matrix}"),
        (n.command_names, r"\dfrac{1}{2} \leq \tfrac12", r"\frac{1}{2} \le \frac12"),
        (n.command_names, r"x \lt 3", "x < 3"),
        (n.sizing, r"\left(1\right)\bigl[2\bigr]", "(1)[2]"),
        (n.sizing, r"\leftarrow", r"\leftarrow"),
        (n.spacing, r"32,\!349", "32,349"),
        (n.spacing, r"a\,b\quad c~d", "a b c d"),
        (n.spacing, r"1 \\ 2", r"1 \\ 2"),
        (n.plain_operators, "x**2 >= 3", r"x^2 \ge  3"),
        (n.plain_functions, "sqrt(3)", r"\sqrt{3}"),
        (n.plain_functions, "np.arcsin(x)", r"\arcsin (x)"),
        (n.plain_functions, "2pi", r"2\pi "),
        (n.repeating_decimals, r"0.\overline{3}", r"\frac{3}{9}"),
        (n.repeating_decimals, r"0.1\overline{6}", r"\frac{15}{90}"),
        (n.degrees, r"90^{\circ}", r"90^\circ "),
        (n.degrees, "90 degrees", r"90^\circ "),
        (n.percent_sign, "28 percent", "28%"),
        (n.percent_sign, r"28\%", "28%"),
        (n.currency, r"\$36", "36"),
        (n.conjunctions, r"2 \text{ and } 3", "2, 3"),
        (n.conjunctions, "19, 46, and 82", "19, 46, 82"),
        (n.text_commands, r"5 \text{ cm}^2", "5 "),
        (n.text_commands, r"\text{Evelyn}", " Evelyn "),
        (n.text_commands, r"\mathbf{2340}", "2340"),
        (n.choose, r"{10 \choose 3}", r"\binom{10 }{ 3}"),
        (n.magnitudes, "3.5 million", r"3.5 \times 10^{6}"),
        (n.inner_boxes, r"x = \boxed{5}", "x = {5}"),
        (n.end_punctuation, " = 5.", "5"),
    ],
)
def test_each_quirk_of_spelling_is_mended(step: object, before: str, after: str) -> None:
    assert callable(step)
    assert step(before) == after


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("5 cm^2", "5"),
        ("12 dogs", "12"),
        ("30 m/s", "30"),
        ("7 square feet", "7"),
        ("5 m", "5"),
        ("3xyz", "3xyz"),
        ("6m", "6m"),
        ("2ab", "2ab"),
        ("apples", "apples"),
    ],
)
def test_units_go_and_products_of_letters_stay(text: str, rest: str) -> None:
    assert drop_units(text) == rest


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("(r+5)^2", "r^2+10r+25"),
        (r"\tan^2(y)+1", r"\sec^2(y)"),
        (r"\frac{5\sqrt{42}}{27}", r"\frac{10\sqrt{10.5}}{27}"),
        (r"\frac{n(n+1)(2 n+1)}{6}", r"\frac{2n^3+3n^2+n}{6}"),
        (r"e^{-2t}/3", r"\frac{1}{3e^{2t}}"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\log_2 8", "3"),
        (r"\binom{5}{2}", "5!/12"),
        (r"e^{i\pi}", "-1"),
        (r"2\frac{1}{3}", r"\frac{7}{3}"),
        (r"\tan 45^\circ", "1"),
        (r"\sqrt{1-x^2}", r"(1-x^2)^{1/2}"),
    ],
)
def test_equal_expressions_are_equal(a: str, b: str) -> None:
    assert expressions_equal(parse_expression(a), parse_expression(b)) is True


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x+1", "x-1"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("f(x)", "f(y)"),
        ("f(x+y)", "f(x)+f(y)"),
        (r"\frac{dy}{dx}", r"\frac{y}{x}"),
        ("2^{100}", "2^{101}"),
        ("10^{30}", "10^{30}+1"),
        ("n!", "n"),
        (r"\sqrt{x^2}", "x"),
        (r"\lceil n/2 \rceil + 1", "2"),
        ("I(0)", "0"),
        ("i", "-i"),
        ("9^{9^9}", "5"),
    ],
)
def test_different_expressions_are_different(a: str, b: str) -> None:
    assert expressions_equal(parse_expression(a), parse_expression(b)) is False


def test_astronomical_values_are_refused_instead_of_computed() -> None:
    with pytest.raises(TooLarge):
        expressions_equal(parse_expression("10^{10^{10^{10}}}"), parse_expression("5"))


@pytest.mark.parametrize("text", [r"\sum_{k=1}^n k", "x =", "(1", r"\cos t / 5", "1 2", "(" * 500 + ")" * 500])
def test_what_the_grammar_does_not_know_is_unsupported(text: str) -> None:
    with pytest.raises(Unsupported):
        parse_expression(text)


def test_proportional_finds_the_sign_of_the_factor() -> None:
    a, minus_twice_a, other = (parse_expression(s) for s in ("2x+4y-3", "-4x-8y+6", "2x+4y-2"))
    assert proportional(a, minus_twice_a) == -1
    assert proportional(a, a) == 1
    assert proportional(a, other) == 0


def test_sets_of_reals_become_sorted_disjoint_pieces() -> None:
    infinity = float("inf")
    assert pieces_of(parse_answer(r"(3,5) \cup [1,3]")) == [Piece(1, 5, True, False)]
    assert pieces_of(parse_answer(r"x \ne 2")) == [Piece(-infinity, 2, False, False), Piece(2, infinity, False, False)]
    assert pieces_of(parse_answer(r"-1 \le x < 4")) == [Piece(-1, 4, True, False)]
    assert pieces_of(parse_answer("(a, b)")) is None


CORRECT = [
    ("5", r"\boxed{5}"),
    ("1/3", r"\boxed{0.333333}"),
    ("1,000", "1000"),
    ("12:00", "12:00"),
    ("2:3", "4:6"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("f(x)=x^2", "y=x^2"),
    ("x<3", r"(-\infty,3)"),
    (r"x \in [-2,7]", r"-2 \le x \le 7"),
    (r"-1<x<1", "|x|<1"),
    (r"(-\infty,2)\cup(2,\infty)", r"x \neq 2"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,-2", r"\boxed{-2} and \boxed{1}"),
    (r"\pm 3", "3,-3"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    ("a=1,b=2", "b=2,a=1"),
    ("AB=4,CD=5", "4, 5"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
    ("(p,q)=(3,2)", "(3,2)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1 & 2\\ 3 & \frac{8}{2}\end{bmatrix}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    ("x < 1", "-x > -1"),
    ("f(2) < f(1) < f(4)", "f(4) > f(1) > f(2)"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(B)}", "B"),
    ("A", "(A) 5"),
    ("B", r"\boxed{\textbf{(B)}\ 5}"),
    ("C. x = 42", "C"),
    ("20:34", r"08:34 \text{P.M.}"),
    (r"\{x \mid x > 3\}", r"(3,\infty)"),
    (r"\{1,3\} \cup \{2,4\}", r"\{1,2,3,4\}"),
    (r"\begin{cases} a+b=\frac12 \\ a-b=1 \end{cases}", r"\begin{cases} a-b=1\\ a+b=0.5\end{cases}"),
    ("3.5 million", "3500000"),
    ("3s^2", "3*s**2"),
    (r"\mbox{four}", "4"),
    (r"\emptyset", "no solution"),
    ("204_5", "204_{5}"),
    (r"\frac{\sqrt{3}}{3} \approx 0.577", r"\frac{1}{\sqrt{3}}"),
    (r"45^\circ", r"\frac{\pi}{4}"),
    (r"\sum_{k=1}^{n} k", r"\sum_{k=1}^{n} k"),
    (r"2.88 \times 10^{-19}", r"\boxed{2.88 \times 10^{-19} \text{ J}}"),
    (r"4.5 \times 10^{33}", r"\boxed{4.5 \times 10^{33}\ \mathrm{erg}\,\mathrm{s}^{-1}}"),
]
WRONG = [
    ("5", r"\boxed{6}"),
    ("5", "5.001"),
    ("16386.17", "16386.16"),
    ("6.6e-34", "1e-20"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2", "1,2,3"),
    ("-2,1", "-2.1"),
    ("12", "1 2"),
    ("32349", "32, 349"),
    ("x=1,y=2", "x=2,y=1"),
    ("AB=4,CD=5", "5,4"),
    ("x=5", "y=6"),
    ("2x+z=1", "1"),
    ("0", "2x+4y=0"),
    ("x<3", r"x\le 3"),
    ("12:00", "1:00"),
    ("4343_6", "4343"),
    ("east", "seat"),
    ("no", "on"),
    (r"\text{odd}", "oddd"),
    ("d", r"\text{E}"),
    ("A", "(A), (B)"),
    ("A", "A or B"),
    ("9:24", "3/8"),
    ("1,2,2", "1,1,2"),
    ("3", "3xyz"),
    (r"\infty", r"-\infty"),
    (r"3 \times 10^{2}", r"3 \times 10^{2} x"),
]


@pytest.mark.parametrize(("gold", "response"), CORRECT)
def test_equal_answers_are_correct(gold: str, response: str) -> None:
    assert verify(gold, response).status == "correct"


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_different_answers_are_wrong(gold: str, response: str) -> None:
    assert verify(gold, response).status == "wrong"


def test_verdict_says_what_was_extracted_and_why_nothing_could_be_read() -> None:
    assert verify("5", r"so \boxed{ 6 }").extracted == "6"
    assert verify("5", "").detail == "no final answer found"
    assert verify("5", r"\boxed{\notacommand{}{}}").status == "unparsed"


@pytest.mark.parametrize("gold", ["5", r"\frac{1}{2}", "(1,2)", r"\text{east}", "4.5e33", r"\sum_{k=1}^n a_k", "5, 7"])
def test_usable_golds_are_accepted(gold: str) -> None:
    assert parse_gold(gold)


@pytest.mark.parametrize("gold", ["", "  ", r"\frac{", "{{{", r"\begin{foo}", "x" * 5000])
def test_a_gold_that_cannot_be_parsed_is_refused_with_the_fix(gold: str) -> None:
    with pytest.raises(ValueError, match=r"gold .*(give|write)"):
        parse_gold(gold)


def test_plain_numbers_need_neither_sympy_nor_torch() -> None:
    code = (
        "import sys; from gxpo_trainer.verify.math import verify; "
        "assert verify('5', r'so \\boxed{5}').status == 'correct'; "
        "assert not {'sympy', 'torch', 'ray', 'vllm'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
