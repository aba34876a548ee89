"""Expressions as functions, sets of reals, and the verdicts on whole answers."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from gxpo_trainer.grading.engine import nesting, parse_latex
from gxpo_trainer.grading.equality import expressions_equal, finite_decimal, proportional, values_equal
from gxpo_trainer.grading.expression import parse_expression
from gxpo_trainer.grading.extract import MAX_ANSWER_CHARS
from gxpo_trainer.grading.latex import MAX_NESTING, TooLarge, Unsupported, clean, same_tokens
from gxpo_trainer.grading.realsets import real_sets_equal
from gxpo_trainer.grading.structure import parse_answer, split_condition
from gxpo_trainer.grading.verify import TOO_LARGE, parse_gold, texts_equal, verify
from gxpo_trainer.types import EVASION, Verdict


def test_decimal_tolerance_is_one_part_in_10000_and_only_for_values_without_a_finite_decimal() -> None:
    third = Fraction(1, 3)
    assert values_equal(third, Fraction(3333, 10000), decimal=True)
    assert not values_equal(third, Fraction(333, 1000), decimal=True)
    assert not values_equal(third, Fraction(3333, 10000), decimal=False)
    assert not values_equal(Fraction(5), Fraction(500001, 100000), decimal=True)
    assert finite_decimal(Fraction(7, 80))
    assert not finite_decimal(Fraction(1, 6))


def test_texts_are_the_same_only_token_by_token() -> None:
    assert same_tokens(r"2 ^{n} - 1", "2^{n}-1")
    assert not same_tokens(r"2^{n-1}", "2^{n}-1")
    assert not same_tokens("1 2", "12")
    assert not same_tokens(r"\frac12", r"\frac{1}{2}")


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
        (r"\arsinh x", r"\ln(x+\sqrt{x^2+1})"),
        (r"\arcosh x", r"\ln(x+\sqrt{x^2-1})"),
        (r"\artanh x", r"\frac{1}{2}\ln\frac{1+x}{1-x}"),
        (r"\arcsec x", r"\arccos(1/x)"),
        (r"\sqrt{1-x^2}", r"(1-x^2)^{1/2}"),
        ("9!!", "945"),
        (r"\max(3, 7)", "7"),
        (r"2\cis \frac{\pi}{3}", r"1+\sqrt{3}i"),
        (r"(-8)^{1/3}", "-2"),
        (r"\frac{|x|+x}{2}", r"\max(x,0)"),
        (r"(v/g)^{1/n}", r"v^{1/n}/g^{1/n}"),
        (r"(-1)^n", r"\cos(n\pi)"),
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
        (r"\ln(x^2)", r"2\ln x"),
        (r"\ln|x|", r"\ln x"),
        ("|x-3|", "3-x"),
        ("|x-100|", "100-x"),
        ("|x-1|+|x-2|", "|2x-3|"),
        ("|x|+|y|", "|x+y|"),
        (r"\arctan(\tan x)", "x"),
        (r"\lfloor n/2\rfloor+1", r"\lceil n/2\rceil"),
        (r"2^{n}-1", r"2^{n-1}"),
        (r"\frac{35}{2}\pi", r"\frac{35}{2\pi}"),
        (r"\sqrt{2}x", r"\sqrt{2x}"),
    ],
)
def test_different_expressions_are_different(a: str, b: str) -> None:
    assert expressions_equal(parse_expression(a), parse_expression(b)) is False


@pytest.mark.parametrize(
    "text", ["10^{10^{10^{10}}}", "9^{9^9}", "10^{-10^{10}}", "100!!!", r"\sin(10^{30})", "1e99999"]
)
def test_astronomical_values_are_refused_instead_of_computed(text: str) -> None:
    with pytest.raises(TooLarge):
        expressions_equal(parse_expression(text), parse_expression("0"))


@pytest.mark.parametrize(
    "text",
    [r"\sum_{k=1}^n k", "x =", "(1", r"\cos t / 5", "1 2", "(" * 500 + ")" * 500, r"\ln(" * 400 + "x" + ")" * 400],
)
def test_what_the_grammar_does_not_know_is_unsupported(text: str) -> None:
    with pytest.raises(Unsupported):
        parse_expression(text)


def test_proportional_finds_the_sign_of_the_factor() -> None:
    a, minus_twice_a, other = (parse_expression(s) for s in ("2x+4y-3", "-4x-8y+6", "2x+4y-2"))
    assert proportional(a, minus_twice_a) == -1
    assert proportional(a, a) == 1
    assert proportional(a, other) == 0


@pytest.mark.parametrize(
    ("text", "same", "different"),
    [
        (r"(3,5) \cup [1,3]", "[1,5)", ["(1,5)", "[1,5]", "[1,4)", r"[1,3) \cup (3,5)"]),
        (r"x \ne 2", r"(-\infty,2) \cup (2,\infty)", [r"\mathbb{R}", "x > 2", r"\mathbb{R} \setminus \{3\}"]),
        (r"-1 \le x < 4", "[-1,4)", ["(-1,4)", "[-1,4]", "[-1,5)"]),
        ("|x-3|<2", "1 < x < 5", ["[1,5]", "1 < x", "(1,6)"]),
        (r"|2x+1| \ge 3", r"x \le -2 \text{ or } x \ge 1", ["|2x+1| > 3", r"[-2,1]", r"x \ge 1"]),
        ("|x| + |x-1| < 3", "(-1,2)", ["(-1,2]", "(-2,2)", "[0,1]"]),
        ("6-2x < 4", "x > 1", ["x < 1", r"x \ge 1", "x > 2"]),
        ("2x < x + 3", "x < 3", ["x > 3", "x < 1", r"x \le 3"]),
        ("]0,1]", "0 < x \\le 1", ["[0,1]", "]0,1[", "[0,1[", "]0,2]"]),
        (r"\mathbb{R}", r"(-\infty,\infty)", [r"\{\}", r"[0,\infty)", r"x \ne 0"]),
        (r"\{\}", r"\emptyset", [r"\{0\}", r"\mathbb{R}"]),
    ],
)
def test_sets_of_reals_are_equal_by_their_elements(text: str, same: str, different: list[str]) -> None:
    gold = parse_answer(clean(text))
    assert real_sets_equal(gold, parse_answer(clean(same)))
    assert real_sets_equal(parse_answer(clean(same)), gold)
    assert [real_sets_equal(gold, parse_answer(clean(other))) for other in different] == [False] * len(different)


@pytest.mark.parametrize(
    "text", ["(a, b)", "a < b < c", "(1, 2, 3)", "x^2 < 4", "x + y < 1", r"\sin x < x", r"\lfloor x \rfloor < 2"]
)
def test_other_answers_are_no_sets_of_reals(text: str) -> None:
    assert real_sets_equal(parse_answer(text), parse_answer("[0,1)")) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"2^n-1\text{ for all }n", ("2^n-1", r"\text{ for all }n")),
        (r"\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", (r"\frac{\pi}{4}+k\pi", r"k\in\mathbb{Z}")),
        ("x^2 (x > 0)", ("x^2", "(x > 0)")),
        ("f(x)", ("f(x)", "")),
        ("x < 1, x > 3", ("x < 1, x > 3", "")),
        ("2, 3", ("2, 3", "")),
    ],
)
def test_a_condition_behind_an_answer_is_split_off(text: str, parts: tuple[str, str]) -> None:
    assert split_condition(text) == parts


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
    # Choices, ordinals, e-notation, units.
    ("12", r"\boxed{\textbf{(B) } 12}"),
    ("D", "Comparing with the five choices, the correct option is **D. 144**."),
    ("12", r"\boxed{12^{\text{th}}}"),
    ("10^{-3}", "1e-3"),
    ("24", r"\boxed{24\,\mathrm{km}\cdot\mathrm{h}^{-1}}"),
    ("0.64", r"\boxed{0.64N}"),
    ("2.5", r"\boxed{2.5\ \Omega}"),
    (r"1500\text{ m}", r"\boxed{1.5\text{ km}}"),
    (r"\$0.80", r"\boxed{80\text{ cents}}"),
    ("25\\%", "0.25"),
    # Bases, sets, conditions, systems.
    ("1011_2", r"\boxed{(1011)_2}"),
    ("1011_2", r"\boxed{1011_{\text{two}}}"),
    (r"(-\infty,\infty)", r"\boxed{\text{all real numbers}}"),
    ("(1,5)", "|x-3|<2"),
    ("[0,1)", r"\boxed{[0,1[}"),
    (r"\emptyset", r"\boxed{\{\}}"),
    ("2^n-1", r"\boxed{2^n-1\text{ for all }n\ge1}"),
    (r"\frac{\pi}{4}+k\pi", r"\boxed{\frac{\pi}{4}+k\pi,\ k\in\mathbb{Z}}"),
    ("x=1,y=2", r"\boxed{\begin{aligned} x&=1\\ y&=2\end{aligned}}"),
    (r"\boxed{ p = 5, q = 2 \quad \text{and} \quad p = 7, q = 2}", "$p=5,q=2;p=7,q=2$"),
    # Vectors, functions, constants.
    (r"\mathbf{i}-2\mathbf{j}", "(1,-2)"),
    (r"\begin{pmatrix}2\\0\\-3\end{pmatrix}", r"\boxed{2\mathbf i-3\mathbf k}"),
    ("f(x)=2x", "g(x)=2x"),
    ("6x", r"\boxed{\frac{dy}{dx}=6x}"),
    ("512", r"\boxed{2^9=512}"),
    ("22.5^\\circ", r"\boxed{22^\circ 30^\prime}"),
    ("7:32", r"\boxed{\frac{7}{32}}"),
    # Prose in several languages, corrections.
    ("220", "Réponse: Janeth aura encore 220 $ à payer d'ici 12 mois."),
    ("64", "したがって、答えは 64 です。"),
    ("42", "The answer is #### 42"),
    ("5", r"\boxed{4}, wait, no, it is \boxed{5}"),
    ("7", "The answer is seven."),
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
    # One brace moved.
    ("2^{n}-1", "2^{n-1}"),
    (r"\frac1m t", r"\boxed{\frac{1}{mt}}"),
    ("e^{-2t}", r"\boxed{e^{-2}t}"),
    (r"1+\sqrt{3}i", r"\boxed{1+\sqrt{3i}}"),
    # Marks and units are read alike on both sides.
    ("25\\%", "0.25\\%"),
    ("100\\%", "1\\%"),
    (r"5\text{ m}", r"\boxed{5\text{ cm}}"),
    (r"7\text{ days}", "She needs 7 weeks."),
    ("45^\\circ", r"\boxed{45\text{ radians}}"),
    # Shapes.
    ("A", r"\boxed{(A), (C)}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}"),
    ("1", "2x + z = 1"),
    ("5", r"\boxed{x^2=5}"),
    (r"\text{Alice: }3, \text{Bob: }5", r"\boxed{\text{Alice: }5, \text{Bob: }3}"),
    (r"C_{1} e^{t}+C_{2} e^{-t}", r"\boxed{C_{0} e^{t}+C_{2} e^{-t}}"),
    (r"\vec{a}\times\vec{b}", r"\boxed{\vec{b}\times\vec{a}}"),
    # Remarks, hedges, corrections.
    ("9", "Answer: 81 (the square of 9)"),
    ("7", "Answer: 14, which is twice 7."),
    ("3", "The answer is either 3 or 4."),
    ("4", r"\boxed{4}, wait, no, it is \boxed{5}"),
    ("5", r"$\boxed{5}$ or $\boxed{7}$"),
]


@pytest.mark.parametrize(("gold", "response"), CORRECT)
def test_equal_answers_are_correct(gold: str, response: str) -> None:
    assert verify(gold, response).status == "correct"


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_different_answers_are_wrong(gold: str, response: str) -> None:
    assert verify(gold, response).status == "wrong"


def test_verdict_says_what_was_extracted_and_why_nothing_could_be_read() -> None:
    assert verify("5", r"so \boxed{ 6 }").extracted == "6"
    assert verify("5", "") == Verdict("unparsed", None, 0.0, "no final answer found")
    assert verify("5", r"\boxed{\notacommand{}{}}").status == "unparsed"


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        r"\prod_{n=1}^{10^9} n",
        r"\sum_{k=1}^{100000} k",
        "100!!!",
        "((((x+1)^{99})^{99})^{99})^{10^{12}}",
    ],
)
def test_an_answer_beyond_the_bounds_is_wrong_and_says_so(answer: str) -> None:
    verdict = verify("5", rf"\boxed{{{answer}}}")
    assert (verdict.status, verdict.evades) == ("wrong", True)
    assert verdict.detail.startswith(EVASION)
    assert verdict.reward == 0


@pytest.mark.parametrize("answer", [r"\ln(" * 400 + "2" + ")" * 400, "(" * 61 + "5" + ")" * 61])
def test_an_answer_nested_too_deeply_is_unparsed(answer: str) -> None:
    assert verify("5", rf"\boxed{{{answer}}}").status == "unparsed"


@pytest.mark.parametrize("gold", ["5", r"\frac{1}{2}", "(1,2)", r"\text{east}", "4.5e33", r"\sum_{k=1}^n a_k", "5, 7"])
def test_usable_golds_are_accepted(gold: str) -> None:
    assert parse_gold(gold)


@pytest.mark.parametrize(
    "gold", ["", "  ", r"\frac{", "{{{", r"\begin{foo}", "x" * 5000, "1e99999 + x^", r"\sum_{n=1}^{10} x^{20000}"]
)
def test_a_gold_that_cannot_be_parsed_is_refused_with_the_fix(gold: str) -> None:
    with pytest.raises(ValueError, match=r"gold .*(give|write)"):
        parse_gold(gold)


def test_plain_numbers_need_neither_sympy_nor_torch() -> None:
    code = (
        "import sys; from gxpo_trainer.grading.verify import verify; "
        "assert verify('5', r'so \\boxed{5}').status == 'correct'; "
        "assert not {'sympy', 'torch', 'ray', 'vllm'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_answers_are_bounded_in_length_and_nesting() -> None:
    def boxed(answer: str) -> Verdict:
        return verify("5", rf"\boxed{{{answer}}}")

    digits = "1" * MAX_ANSWER_CHARS
    assert boxed(digits) == Verdict("wrong", digits, 0.0)
    assert boxed(digits + "1") == Verdict("unparsed", digits, 0.0, f"final answer of {MAX_ANSWER_CHARS + 1} characters")
    assert boxed("(" * MAX_NESTING + "5" + ")" * MAX_NESTING).status == "unparsed"
    assert "nested more than" not in boxed("(" * MAX_NESTING + "5" + ")" * MAX_NESTING).detail
    assert boxed("(" * (MAX_NESTING + 1) + "5" + ")" * (MAX_NESTING + 1)).detail == (
        f"brackets nested more than {MAX_NESTING} deep"
    )
    assert boxed(".") == Verdict("unparsed", ".", 0.0, "nothing is left of the final answer")
    assert verify("5", r"\boxed{10^{10^{10}}}") == Verdict("wrong", "10^{10^{10}}", 0.0, TOO_LARGE)
    assert parse_gold("7" * MAX_ANSWER_CHARS) == "7" * MAX_ANSWER_CHARS
    assert parse_gold("1e99999") == "1e99999", "too large to compute, but math-verify reads it"
    with pytest.raises(ValueError, match="holds no answer"):
        parse_gold("7" * (MAX_ANSWER_CHARS + 1))


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        # 1,234 as a number or as a list; 1,22 as a decimal where the other side is one.
        ("1,234", "1234", True),
        ("1,234", "1, 234", True),
        ("1,234", "1.234", True),
        ("1,234,567", "1234567", True),
        ("1,22", "1.22", True),
        ("1.22", "1,22", True),
        ("2,1", "2.1", False),
        ("2.1", "2,1", True),
        ("1,22", "1, 22", True),
        ("1,22", "122/100", False),
        # Conditions behind an answer: on one side, or the same on both.
        ("2^n", r"2^n \text{ for } n > 1", True),
        (r"2^n \text{ for } n > 1", "2^n", True),
        ("2^n, n > 1", "2^n, n > 1", True),
        ("2^n, n > 1", "2^n, n > 2", False),
        ("2^n, n > 1", "3^n, n > 1", False),
    ],
)
def test_an_answer_is_equal_in_one_of_its_readings(gold: str, answer: str, verdict: bool) -> None:
    assert texts_equal(clean(gold), clean(answer)) is verdict


def test_of_several_answers_a_comma_joins_nothing() -> None:
    assert texts_equal("1,234", "1234") is True
    assert texts_equal("1,234", "1234", several=True) is False
    assert texts_equal("B, C", "C, B", several=True) is True


@pytest.mark.parametrize(
    ("answer", "decided"),
    [
        ("+".join(["x"] * 40), True),
        ("(" * 60 + "x" + ")" * 60, False),
        (r"\sum_{k=1}^{3} k", True),
        ("x" * 1001, False),
    ],
)
def test_the_engine_reads_what_it_can_read_in_bounded_time(answer: str, decided: bool) -> None:
    assert bool(parse_latex(answer)) is decided


@pytest.mark.parametrize(("text", "depth"), [("", 0), ("()", 1), ("()[]{}", 1), ("([{}])()", 3), (")(", 0), (")((", 1)])
def test_nesting_is_the_deepest_bracket(text: str, depth: int) -> None:
    assert nesting(text) == depth
