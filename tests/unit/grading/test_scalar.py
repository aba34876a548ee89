"""Equality of single values: percent, degrees, units, words, bases, times, ratios, choices; and readings of them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.compare import assigned_name, is_assignment, same_name, value_of
from gxpo_trainer.grading.equality import rational_value
from gxpo_trainer.grading.latex import clean
from gxpo_trainer.grading.scalar import choice_letters, constant, has_letters, is_choice, read, scalars_equal
from gxpo_trainer.grading.structure import Relation, parse_answer


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        # Percent and degrees: stated on one side only, the bare side may mean either.
        ("28%", "28%", True),
        ("28%", "28", True),
        ("28%", "0.28", True),
        ("0.28", "28%", True),
        ("28%", r"\frac{7}{25}", True),
        ("28%", "0.28%", False),
        ("28%", "2.8", False),
        (r"90^\circ", "90", True),
        (r"90^\circ", r"\frac{\pi}{2}", True),
        (r"\frac{\pi}{2}", r"90^\circ", True),
        (r"90^\circ", r"\pi", False),
        (r"90^\circ", r"\frac{\pi}{2}\text{ rad}", True),
        (r"90^\circ", r"\pi \text{ rad}", False),
        (r"100^\circ C", "100", True),
        (r"30^\circ 30'", r"30.5^\circ", True),
        (r"30^\circ 30' 36''", r"30.51^\circ", True),
        (r"30^\circ 30'", r"30.3^\circ", False),
        (r"\sin 30^\circ", r"\frac{1}{2}", True),
        # Units: both stated, quantities; one stated, the number; bare letters, either.
        (r"5 \text{ km}", r"5000 \text{ m}", True),
        (r"5 \text{ km}", r"5 \text{ m}", False),
        (r"5 \text{ km}", "5", True),
        ("5", r"5 \text{ km}", True),
        (r"5 \text{ km}", r"5 \text{ kg}", False),
        (r"5 \text{ dogs}", "5", True),
        (r"5 \text{ dogs}", r"5 \text{ cats}", True),
        ("5 m", "5", True),
        ("5 m", "5m", True),
        ("5 m", "6 m", False),
        ("5m", "m5", True),
        ("5m + 3", "3 + 5 m", True),
        # Words, without case, blanks and articles.
        (r"\text{Yes}", "yes", True),
        (r"\text{the tiger}", "Tiger", True),
        (r"\text{yes}", r"\text{no}", False),
        (r"\text{no}", r"\text{on}", False),
        (r"\text{east}", r"\text{seat}", False),
        (r"\text{New York}", "new york", True),
        ("abc", "cab", True),
        ("ab", "ba", True),
        ("a", "b", False),
        ("a", "A", False),
        ("abcd", "dcba", False),
        (r"\text{twenty-one}", "21", True),
        (r"\text{two thirds}", r"\frac{2}{3}", True),
        (r"\text{tiger}", "5", False),
        ("5", r"\text{tiger}", False),
        (r"\text{none}", r"\emptyset", True),
        (r"\text{none}", r"\text{tiger}", False),
        (r"\text{tiger}", r"\text{none}", False),
        (r"\text{approximately } 5", "5", True),
        ("21^{st}", "21", True),
        ("21st", "21", True),
        ("21st", "22", False),
        # Numbers in a base.
        ("101_2", "101_2", True),
        ("101_2", "101_{2}", True),
        (r"101_{\text{two}}", "101_2", True),
        ("0101_2", "101_2", True),
        ("101_2", "101_3", False),
        ("101_2", "100_2", False),
        ("-101_2", "101_2", False),
        ("101_2", "5", False),
        ("5", "101_2", False),
        ("AB_{12}", "AB_{12}", True),
        ("AB_{12}", "BA_{12}", False),
        # Times of day.
        ("7:05", "07:05", True),
        ("7:05", "7:05:00", True),
        ("7:05:01", "7:05", False),
        ("7:05", "7:06", False),
        ("7:05 p.m.", "19:05", True),
        ("7:05 p.m.", "7:05 PM", True),
        ("7:05 p.m.", "7:05 a.m.", False),
        ("7:05 p.m.", "7:05", True),
        ("7:05", "7:05 a.m.", True),
        ("7:05 p.m.", "8:05", False),
        ("12:00 a.m.", "0:00", True),
        ("12:00 a.m.", "12:00 p.m.", False),
        ("12:30 p.m.", "12:30", True),
        ("7 p.m.", "7:00 p.m.", True),
        # Ratios.
        ("2:3", "4:6", True),
        ("2:3", r"\frac{2}{3}", True),
        (r"\frac{2}{3}", "2:3", True),
        ("2:3", "3:2", False),
        ("1:2:3", "2:4:6", True),
        ("1:2:3", "2:4:5", False),
        ("1:2:3", "1:2", False),
        ("2 to 3", "2:3", True),
        ("9:24", "3:8", True),
        ("9:24", r"\frac{3}{8}", False),
        ("9:24", "9:24", True),
        # Labels of choices before a value.
        ("12", "(B) 12", True),
        ("12", "B. 12", True),
        ("12", "(B) 13", False),
        ("(A) 12", "(B) 12", False),
    ],
)
def test_single_values_are_compared_for_what_they_say(gold: str, answer: str, verdict: bool) -> None:
    assert scalars_equal(clean(gold), clean(answer)) is verdict


@pytest.mark.parametrize(
    ("text", "value", "mark", "unit", "whole", "words"),
    [
        ("5", 5, "", False, False, None),
        ("5%", 5, "%", False, False, None),
        (r"5^\circ", 5, "°", False, False, None),
        (r"5^\circ C", 5, "°", False, False, None),
        (r"30^\circ 30'", Fraction(61, 2), "°", False, False, None),
        (r"36''", Fraction(1, 100), "°", False, False, None),
        (r"5 \text{ km}", 5, "", True, False, None),
        ("5 km", 5, "", True, True, None),
        (r"5 \text{ dogs}", 5, "", False, False, None),
        (r"\text{five}", 5, "", False, False, "five"),
        (r"\text{about } 5", 5, "", False, False, None),
        ("21st", 21, "", False, False, None),
        (r"\text{Tiger}", None, "", False, False, "tiger"),
        (r"\int x", None, "", False, False, None),
        ("", None, "", False, False, None),
    ],
)
def test_a_scalar_is_read_once(
    text: str, value: int | Fraction | None, mark: str, unit: bool, whole: bool, words: str | None
) -> None:
    reading = read(text)
    assert (None if reading.node is None else rational_value(reading.node)) == value
    assert (reading.mark, reading.unit is not None, reading.whole is not None) == (mark, unit, whole)
    assert reading.words == words


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("B", "B", True),
        ("B", "(B)", True),
        ("B", "B.", True),
        ("(B)", "b", True),
        ("B", "(b)", True),
        ("B", "b", False),
        ("B", "C", False),
        ("B", "(C)", False),
        ("B", "(B) 12", True),
        ("B", "B. 12", True),
        ("B", "C) 12", False),
        ("B", "(B) (C)", False),
        ("B", "(A) 1 (B) 2", False),
        ("B", "12", None),
        ("12", "B", None),
        ("(B) 12", "B", True),
        ("(B) 12", "C", False),
        ("(B) 12", "b", None),
        ("(B) 12", "(B) 12", True),
        ("(B) 12", "12", None),
        (r"\text{(B)}", "B", True),
    ],
)
def test_a_choice_letter_is_compared_as_one(gold: str, answer: str, verdict: bool | None) -> None:
    assert choice_letters(gold, answer) is verdict


def test_choices_and_constants_are_told_from_other_answers() -> None:
    assert [text for text in ("B", "(B)", "B.", "b", "K", "BC", "12") if is_choice(text)] == ["B", "(B)", "B."]
    assert constant(r"\frac{2}{4}") == Fraction(1, 2)
    assert [constant(text) for text in ("x", r"\pi", "1/0", r"\int", "9^{9^9}")] == [None] * 5
    assert has_letters("2x")
    assert not has_letters("2")
    assert not has_letters(r"\text{tiger}")


@pytest.mark.parametrize(
    ("text", "assignment", "value", "name"),
    [
        ("x = 5", True, "5", "x"),
        ("x_{1} = 5", True, "5", "x_1"),
        ("f(x) = 2x", True, "2x", "f(x)"),
        (r"f^{-1}(x) = 2x", None, "2x", None),
        ("x = y = 5", True, "5", "x"),
        (r"x = \sqrt{2} \approx 1.4", True, r"\sqrt{2}", "x"),
        (r"x \approx 1.4", True, "1.4", "x"),
        (r"x \in (1, 2)", True, "(1, 2)", "x"),
        ("|AB| = 5", True, "5", "|AB|"),
        (r"\text{area} = 5", True, "5", r"\textarea"),
        (r"\angle ABC = 5", True, "5", r"\angleABC"),
        ("(p, q) = (1, 2)", True, "(1, 2)", "(p,q)"),
        ("A:B = 2:3", True, "2:3", "A:B"),
        ("a + b = 5", False, "5", None),
        ("2^9 = 512", False, "512", None),
        ("2^9 = 513", False, "513", None),
        (r"1.41 \approx x", False, "1.41", None),
        ("2x + z = 1", False, None, None),
        ("x^2 + 2x + 1 = (x+1)^2", False, "(x+1)^2", None),
        ("2x = x + x = 3x", False, None, None),
        ("x < 5", False, None, None),
        ("x = y < 5", False, None, None),
        (r"\frac{1}{2} = 0.5", False, "0.5", None),
    ],
)
def test_an_assignment_states_a_value_of_a_name(
    text: str, assignment: bool | None, value: str | None, name: str | None
) -> None:
    relation = parse_answer(text)
    assert isinstance(relation, Relation)
    assert value_of(relation) == value
    if assignment is not None:
        assert is_assignment(relation) is assignment
        assert assigned_name(relation) == name


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("x = 1", "x = 2", True),
        ("x_1 = 1", "x_{1} = 2", True),
        ("x = 1", "y = 1", False),
        ("y = x", "f(x) = x", True),
        ("f(x) = x", "y = x", True),
        ("x = 1", "f(x) = x", False),
        ("f(x) = x", "g(x) = x", True),
        ("f(x) = x", "g(t) = t", False),
        ("x = 1", "1", False),
        ("1", "1", False),
    ],
)
def test_names_are_the_same_or_both_a_function_value(a: str, b: str, same: bool) -> None:
    assert same_name(parse_answer(a), parse_answer(b)) is same
