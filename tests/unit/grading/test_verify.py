"""Verdicts on whole answers, and the rules of one problem: units, tolerances, several answers."""

from __future__ import annotations

import json

import pytest

from gxpo_trainer.grading.engine import nesting
from gxpo_trainer.grading.extract import MAX_ANSWER_CHARS
from gxpo_trainer.grading.latex import MAX_NESTING, clean
from gxpo_trainer.grading.verify import TOO_LARGE, parse_gold, texts_equal, verify
from gxpo_trainer.types import EVASION, Verdict, VerifyOptions


def test_equal_answers_are_correct() -> None:
    answers = [
        # What the parts of the grader hold together; what each of them reads is in its own test.
        ("5", r"\boxed{5}"), ("1/3", r"\boxed{0.333333}"), ("1,000", "1000"), ("1,-2", r"\boxed{-2} and \boxed{1}"),
        ("B", r"\boxed{\textbf{(B)}\ 5}"), (r"\{x \mid x > 3\}", r"(3,\infty)"), ("3.5 million", "3500000"),
        ("3s^2", "3*s**2"), (r"\mbox{four}", "4"), (r"\frac{\sqrt{3}}{3} \approx 0.577", r"\frac{1}{\sqrt{3}}"),
        (r"\sum_{k=1}^{n} k", r"\sum_{k=1}^{n} k"), ("f(2) < f(1) < f(4)", "f(4) > f(1) > f(2)"),
        (r"2.88 \times 10^{-19}", r"\boxed{2.88 \times 10^{-19} \text{ J}}"),
        (r"4.5 \times 10^{33}", r"\boxed{4.5 \times 10^{33}\ \mathrm{erg}\,\mathrm{s}^{-1}}"),
        # Choices, ordinals, e-notation, units.
        ("12", r"\boxed{12^{\text{th}}}"), ("10^{-3}", "1e-3"), ("24", r"\boxed{24\,\mathrm{km}\cdot\mathrm{h}^{-1}}"),
        ("0.64", r"\boxed{0.64N}"), ("2.5", r"\boxed{2.5\ \Omega}"), (r"1500\text{ m}", r"\boxed{1.5\text{ km}}"),
        (r"\$0.80", r"\boxed{80\text{ cents}}"), ("25\\%", "0.25"),
        # Bases, sets, conditions, functions.
        ("1011_2", r"\boxed{(1011)_2}"), (r"(-\infty,\infty)", r"\boxed{\text{all real numbers}}"),
        ("2^n-1", r"\boxed{2^n-1\text{ for all }n\ge1}"), ("6x", r"\boxed{\frac{dy}{dx}=6x}"),
        (r"\frac{\pi}{4}+k\pi", r"\boxed{\frac{\pi}{4}+k\pi,\ k\in\mathbb{Z}}"),
        # Signs of zero.
        ("0", r"\boxed{-0}"), ("-0", r"\boxed{0}"), ("0", r"\boxed{+0}"),
        # Prose in several languages, corrections.
        ("220", "Réponse: Janeth aura encore 220 $ à payer d'ici 12 mois."), ("64", "したがって、答えは 64 です。"),
        ("42", "The answer is #### 42"), ("5", r"\boxed{4}, wait, no, it is \boxed{5}"), ("7", "The answer is seven."),
        ("3\\pi", "The area is 3π."), (r"\frac{3\pi}{2}", "The area of it is 3π/2 then."), ("\\pi/3", r"It is \pi/3."),
    ]  # fmt: skip
    assert [pair for pair in answers if verify(*pair).status != "correct"] == []


def test_different_answers_are_wrong() -> None:
    answers = [
        ("5", r"\boxed{6}"), ("5", "5.001"), ("-2,1", "-2.1"), ("12", "1 2"), ("AB=4,CD=5", "5,4"), ("2x+z=1", "1"),
        ("A", "(A), (B)"), ("A", "A or B"), ("3", "3xyz"), ("5", r"\boxed{x^2=5}"), ("1", "2x + z = 1"),
        ("5", r"\boxed{-0}"), ("-5", r"\boxed{5}"),
        # One brace moved.
        ("2^{n}-1", "2^{n-1}"), (r"\frac1m t", r"\boxed{\frac{1}{mt}}"), ("e^{-2t}", r"\boxed{e^{-2}t}"),
        (r"1+\sqrt{3}i", r"\boxed{1+\sqrt{3i}}"),
        # Marks and units are read alike on both sides.
        ("25\\%", "0.25\\%"), ("100\\%", "1\\%"), (r"5\text{ m}", r"\boxed{5\text{ cm}}"),
        (r"7\text{ days}", "She needs 7 weeks."), ("45^\\circ", r"\boxed{45\text{ radians}}"),
        # Shapes.
        (r"\text{Alice: }3, \text{Bob: }5", r"\boxed{\text{Alice: }5, \text{Bob: }3}"),
        (r"C_{1} e^{t}+C_{2} e^{-t}", r"\boxed{C_{0} e^{t}+C_{2} e^{-t}}"),
        (r"\vec{a}\times\vec{b}", r"\boxed{\vec{b}\times\vec{a}}"),
        # A number is not that many times π.
        ("3", "The area is 3π."), ("3", r"The area is 3\pi."), ("3", "The area is 3 pi."), ("2", "The area is 3π/2."),
        ("3", r"We see that the angle is \pi/3 there."),
        # Remarks, hedges, corrections.
        ("9", "Answer: 81 (the square of 9)"), ("3", "The answer is either 3 or 4."),
        ("4", r"\boxed{4}, wait, no, it is \boxed{5}"), ("5", r"$\boxed{5}$ or $\boxed{7}$"),
    ]  # fmt: skip
    assert [pair for pair in answers if verify(*pair).status != "wrong"] == []


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}", r"\prod_{n=1}^{10^9} n", r"\sum_{k=1}^{100000} k", "100!!!",
        "((((x+1)^{99})^{99})^{99})^{10^{12}}",
    ],
)  # fmt: skip
def test_an_answer_beyond_the_bounds_is_wrong_and_says_so(answer: str) -> None:
    verdict = verify("5", rf"\boxed{{{answer}}}")
    assert (verdict.status, verdict.evades) == ("wrong", True)
    assert verdict.detail.startswith(EVASION)
    assert verdict.reward == 0


@pytest.mark.parametrize(
    "gold", ["", "  ", r"\frac{", "{{{", r"\begin{foo}", "x" * 5000, "1e99999 + x^", r"\sum_{n=1}^{10} x^{20000}"]
)
def test_a_gold_that_cannot_be_parsed_is_refused_with_the_fix(gold: str) -> None:
    with pytest.raises(ValueError, match=r"gold .*(give|write)"):
        parse_gold(gold)


def test_answers_are_bounded_in_length_and_nesting() -> None:
    def boxed(answer: str) -> Verdict:
        return verify("5", rf"\boxed{{{answer}}}")

    digits = "1" * MAX_ANSWER_CHARS
    assert boxed(digits) == Verdict("wrong", digits, 0.0)
    assert boxed(digits + "1") == Verdict("unparsed", digits, 0.0, f"final answer of {MAX_ANSWER_CHARS + 1} characters")
    assert boxed("(" * MAX_NESTING + "5" + ")" * MAX_NESTING).status == "unparsed"
    assert "nested more than" not in boxed("(" * MAX_NESTING + "5" + ")" * MAX_NESTING).detail
    assert boxed(r"\ln(" * 400 + "2" + ")" * 400).status == "unparsed"
    assert boxed("(" * (MAX_NESTING + 1) + "5" + ")" * (MAX_NESTING + 1)).detail == (
        f"brackets nested more than {MAX_NESTING} deep"
    )
    depths = {"": 0, "()": 1, "()[]{}": 1, "([{}])()": 3, ")(": 0, ")((": 1}
    assert {text: nesting(text) for text in depths} == depths
    assert boxed(".") == Verdict("unparsed", ".", 0.0, "nothing is left of the final answer")
    assert boxed(" 6 ").extracted == "6"
    assert boxed(r"\notacommand{}{}").status == "unparsed"
    assert verify("5", "") == Verdict("unparsed", None, 0.0, "no final answer found")
    assert verify("5", r"\boxed{10^{10^{10}}}") == Verdict("wrong", "10^{10^{10}}", 0.0, TOO_LARGE)
    assert parse_gold("7" * MAX_ANSWER_CHARS) == "7" * MAX_ANSWER_CHARS
    assert parse_gold("1e99999") == "1e99999", "too large to compute, but math-verify reads it"
    with pytest.raises(ValueError, match="holds no answer"):
        parse_gold("7" * (MAX_ANSWER_CHARS + 1))


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        # 1,234 as a number or as a list; 1,22 as a decimal where the other side is one.
        ("1,234", ["1234", "1, 234", "1.234"], []),
        ("1,234,567", ["1234567"], []),
        ("1,000", ["1000", "1 000"], ["1,00", "1, 0"]),
        ("1,22", ["1.22", "1, 22"], ["122/100"]),
        ("1.22", ["1,22"], []),
        ("2,1", [], ["2.1"]),
        ("2.1", ["2,1"], []),
        # Conditions behind an answer: on one side, or the same on both.
        ("2^n", [r"2^n \text{ for } n > 1"], []),
        (r"2^n \text{ for } n > 1", ["2^n"], []),
        ("2^n, n > 1", ["2^n, n > 1"], ["2^n, n > 2", "3^n, n > 1"]),
    ],
)  # fmt: skip
def test_an_answer_is_equal_in_one_of_its_readings(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: texts_equal(clean(gold), clean(answer)) for answer in expected} == expected


@pytest.mark.parametrize(
    ("gold", "tolerance", "unit", "near", "far"),
    [
        ("10", 0.1, None, ["10.1", "9.9", "x = 10.1"],
         ["10.11", "9.89", "-10", "10, 20", "10i", "x", "1/0", "a < 10"]),
        ("x = 10", 0.1, None, ["10.1"], []),
        (r"\sqrt{2}", 0.01, None, ["1.41"], ["1.40"]),
        ("1.41", 0.01, None, [r"\sqrt{2}"], []),
        ("10, 20", 0.1, None, ["20.1, 10.1"], ["10.1, 20.2", "10, 10", "10"]),
        # 1.05 is near both golds, 0.95 near the first alone.
        ("1, 1.1", 0.1, None, ["1.05, 0.95"], ["1.05, 0.85"]),
        ("10, x", 0.1, None, ["x, 10.1"], ["10, y", "10.2, x"]),
        # A tolerance counts in the unit of the gold; 5000 m are no speed, though 5000 m/s are 18,000 km/h.
        ("5", 0.1, "km", [r"5.1 \text{ km}", r"5100 \text{ m}", "5.1"],
         [r"5101 \text{ m}", r"5 \text{ m}", r"5 \text{ kg}"]),
        ("18000", 0.1, "km/h", [r"5000 \text{ m/s}"], [r"5000 \text{ m}"]),
        ("5", 0.1, None, [r"5.1 \text{ km}"], []),
        # It widens numbers alone: not the order, brackets, names, units and marks.
        ("(1,2]", 0.1, None, ["(1.1,2]"], ["[1,2)", "(1,2)"]), ("(1,2)", 0.1, None, ["(1.1,2)", "1.1, 2"], ["(2,1)"]),
        ("[1,2]", 0.1, None, [r"1.1 \le x \le 2"], ["(1,2)"]), (r"\{1,2\}", 0.1, None, [r"\{2,1.1\}"], []),
        (r"(1,2) \cup (3,4)", 0.1, None, [r"(3.1,4) \cup (1,2)"], []),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", 0.1, None, [r"\begin{pmatrix}1.1\\2\end{pmatrix}"], []),
        (r"45 \text{ m}", 0.1, None, [r"4510 \text{ cm}"], [r"45 \text{ s}", r"45 \text{ cm}"]),
        (r"20^\circ C", 0.1, None, [r"20.1^\circ C", "20.1"], [r"20^\circ F"]),
        (r"45^\circ", 0.1, None, [r"45.1^\circ"], [r"45\text{ rad}", r"45\%"]),
        ("x=1, y=2", 0.1, None, ["y=2, x=1.1", "1.1, 2"], ["x=2, y=1", "2, 1"]),
    ],
)  # fmt: skip
def test_numbers_may_differ_by_a_tolerance(
    gold: str, tolerance: float, unit: str | None, near: list[str], far: list[str]
) -> None:
    expected = dict.fromkeys(near, "correct") | dict.fromkeys(far, "wrong")
    options = VerifyOptions(tolerance, unit)
    assert {text: verify(gold, f"\\boxed{{{text}}}", options).status for text in expected} == expected


MINUTES = VerifyOptions(unit="minute")
AREA = VerifyOptions(unit="$cm^2$")
SEVERAL = VerifyOptions(several=True)
TENTH = VerifyOptions(tolerance=0.1, unit="%")
KM = VerifyOptions(0.1, "km", True)


@pytest.mark.parametrize(
    ("gold", "answer", "options", "by_default", "with_options"),
    [
        # 3/4 h = 45 min; 2700 s = 45 min; 45 h is not.
        ("45", r"\frac{3}{4}\text{ hours}", MINUTES, "wrong", "correct"),
        ("45", r"45\text{ hours}", MINUTES, "correct", "wrong"), ("45", "45", MINUTES, "correct", "correct"),
        # Another quantity is another answer; a unit that is not in the table is dropped.
        ("45", "45 km", MINUTES, "correct", "wrong"),
        # 166 cm² = 0.0166 m².
        ("166", r"166\text{ m}^2", AREA, "correct", "wrong"),
        # An absolute tolerance holds at its bound and not beyond.
        ("4.2", r"4.3\%", TENTH, "wrong", "correct"), ("4.2", "4.31", TENTH, "wrong", "wrong"),
        ("4.2", r"\sqrt{19}", TENTH, "wrong", "wrong"),
        ("1.68, 0.45", "0.46, 1.7", VerifyOptions(0.02, None, True), "wrong", "correct"),
        ("1.68, 0.45", "1.7", VerifyOptions(0.02, None, True), "wrong", "wrong"),
        # Each of several answers is in the unit.
        ("5, 6", "5.05 m, 6 m", KM, "wrong", "wrong"), ("5, 6", "5000 m, 6000 m", KM, "wrong", "correct"),
        ("5, 6", "6.1, 5 km", KM, "wrong", "correct"), ("x=5; y=6", "x=5000 m; y=6000 m", KM, "wrong", "correct"),
        ("5 m, 6", "5 m, 6000 m", KM, "wrong", "correct"), ("(5,6)", "(5000 m, 6000 m)", KM, "wrong", "correct"),
        (r"\pm 5", "5000 m, -5000 m", KM, "wrong", "correct"), ("5, none", "5, none", KM, "correct", "correct"),
        ("(1,2),(3,4)", "(3,4),(1,2)", KM, "correct", "correct"),
        ("5, 6", "5000 m, 6000 m", VerifyOptions(0.1, "km"), "wrong", "correct"),
        ("5,000", "5000000 m", VerifyOptions(0.1, "km"), "wrong", "correct"),
        ("(5,6)", "(5,6) km", VerifyOptions(0.1, "km"), "wrong", "correct"),
        # A comma between several answers is never a decimal or thousands separator.
        ("69,84", "69.84", SEVERAL, "correct", "wrong"),
        ("69,84", r"84 \text{ and } 69", SEVERAL, "correct", "correct"),
        ("(1,2),(3,4)", "(3,4), (1,2)", SEVERAL, "correct", "correct"),
        ("(1,2),(3,4)", "(2,1), (3,4)", SEVERAL, "wrong", "wrong"),
    ],
)  # fmt: skip
def test_a_rule_changes_the_verdict_as_it_says(
    gold: str, answer: str, options: VerifyOptions, by_default: str, with_options: str
) -> None:
    response = f"So it is $\\boxed{{{answer}}}$."
    assert verify(gold, response).status == by_default
    verdict = verify(gold, response, options)
    assert verdict.status == with_options
    assert verdict.extracted == answer


def test_several_answers_may_stand_in_boxes_of_their_own() -> None:
    response = r"If $a = 1$ then $\boxed{69}$. In the other case $a$ is even, so that \boxed{84}."
    assert verify("69,84", response).status == "wrong"
    assert verify("69,84", response, SEVERAL).status == "correct"
    assert verify("69,84,1", response, SEVERAL).status == "wrong"
    # A box too many is not the answer, though the last two boxes alone would be.
    assert verify("69,84", r"First \boxed{3}. Then $\boxed{69}$. And then \boxed{84}.", SEVERAL).status == "wrong"


@pytest.mark.parametrize(
    ("gold", "response", "by_default", "boxed"),
    [
        ("84", "12*7=84, so \\boxed{84}", "correct", "correct"),
        ("84", "\\boxed{12}. No, the final answer is 84.", "correct", "wrong"),
        ("84", "<think>\\boxed{84}</think> It is 84.", "correct", "unparsed"),
        ("B", "The answer is B.", "correct", "unparsed"), ("", "84", "ungraded", "ungraded"),
    ],
)  # fmt: skip
def test_with_boxed_only_a_box_counts(gold: str, response: str, by_default: str, boxed: str) -> None:
    assert verify(gold, response).status == by_default
    assert verify(gold, response, VerifyOptions(boxed=True)).status == boxed


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "is list instead of an object"),
        ({"tolerence": 1}, "unknown key 'tolerence'; use tolerance, unit, several, boxed"),
        ({"tolerance": "0.1"}, "must be a number"), ({"tolerance": -1}, "finite number of at least 0"),
        ({"tolerance": float("inf")}, "finite number"), ({"unit": 3}, "unit = 3: must be text"),
        ({"unit": " "}, "unit is empty"), ({"several": 1}, "must be true or false"),
    ],
)  # fmt: skip
def test_options_survive_json_and_those_that_mean_nothing_are_refused(body: object, complaint: str) -> None:
    options = VerifyOptions(0.5, "km/h", True, boxed=True)
    assert VerifyOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert VerifyOptions().to_dict() == {}
    assert VerifyOptions.from_dict({"tolerance": 0.5, "unit": None, "several": None}) == VerifyOptions(0.5)
    with pytest.raises(ValueError, match=complaint):
        VerifyOptions.from_dict(body)
