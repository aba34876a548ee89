"""Equality of single values: percent, degrees, units, words, bases, times, ratios, choices; and readings of them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.equality import rational_value
from gxpo_trainer.grading.latex import clean
from gxpo_trainer.grading.scalar import choice_letters, constant, has_letters, is_choice, read, scalars_equal


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        # Percent and degrees: stated on one side only, the bare side may mean either.
        ("28%", ["28%", "28", "0.28", r"\frac{7}{25}"], ["0.28%", "2.8"]),
        ("0.28", ["28%"], []),
        (r"90^\circ", ["90", r"\frac{\pi}{2}", r"\frac{\pi}{2}\text{ rad}"], [r"\pi", r"\pi \text{ rad}"]),
        (r"\frac{\pi}{2}", [r"90^\circ"], []),
        (r"100^\circ C", ["100"], []),
        (r"30^\circ 30'", [r"30.5^\circ"], [r"30.3^\circ"]),
        (r"30^\circ 30' 36''", [r"30.51^\circ"], []),
        (r"\sin 30^\circ", [r"\frac{1}{2}"], []),
        # Units: both stated, quantities; one stated, the number; bare letters, either.
        (r"5 \text{ km}", [r"5000 \text{ m}", "5"], [r"5 \text{ m}", r"5 \text{ kg}"]),
        ("5", [r"5 \text{ km}"], []),
        (r"5 \text{ dogs}", ["5", r"5 \text{ cats}"], []),
        ("5 m", ["5", "5m"], ["6 m"]),
        ("5m", ["m5"], []),
        ("5m + 3", ["3 + 5 m"], []),
        # Words, without case, blanks and articles.
        (r"\text{Yes}", ["yes"], []),
        (r"\text{the tiger}", ["Tiger"], []),
        (r"\text{yes}", [], [r"\text{no}"]),
        (r"\text{no}", [], [r"\text{on}"]),
        (r"\text{east}", [], [r"\text{seat}"]),
        (r"\text{New York}", ["new york"], []),
        ("abc", ["cab"], []),
        ("ab", ["ba"], []),
        ("a", [], ["b", "A"]),
        ("abcd", [], ["dcba"]),
        (r"\text{twenty-one}", ["21"], []),
        (r"\text{two thirds}", [r"\frac{2}{3}"], []),
        (r"\text{tiger}", [], ["5", r"\text{none}"]),
        ("5", [], [r"\text{tiger}"]),
        (r"\text{none}", [r"\emptyset"], [r"\text{tiger}"]),
        (r"\text{approximately } 5", ["5"], []),
        ("21^{st}", ["21"], []),
        ("21st", ["21"], ["22"]),
        # Numbers in a base.
        ("101_2", ["101_2", "101_{2}"], ["101_3", "100_2", "5"]),
        (r"101_{\text{two}}", ["101_2"], []),
        ("0101_2", ["101_2"], []),
        ("-101_2", [], ["101_2"]),
        ("5", [], ["101_2"]),
        ("AB_{12}", ["AB_{12}"], ["BA_{12}"]),
        # Times of day.
        ("7:05", ["07:05", "7:05:00", "7:05 a.m."], ["7:06"]),
        ("7:05:01", [], ["7:05"]),
        ("7:05 p.m.", ["19:05", "7:05 PM", "7:05"], ["7:05 a.m.", "8:05"]),
        ("12:00 a.m.", ["0:00"], ["12:00 p.m."]),
        ("12:30 p.m.", ["12:30"], []),
        ("7 p.m.", ["7:00 p.m."], []),
        # Ratios.
        ("2:3", ["4:6", r"\frac{2}{3}"], ["3:2"]),
        (r"\frac{2}{3}", ["2:3"], []),
        ("1:2:3", ["2:4:6"], ["2:4:5", "1:2"]),
        ("2 to 3", ["2:3"], []),
        ("9:24", ["3:8", "9:24"], [r"\frac{3}{8}"]),
        # Labels of choices before a value.
        ("12", ["(B) 12", "B. 12"], ["(B) 13"]),
        ("(A) 12", [], ["(B) 12"]),
    ],
)  # fmt: skip
def test_single_values_are_compared_for_what_they_say(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: scalars_equal(clean(gold), clean(answer)) for answer in expected} == expected


@pytest.mark.parametrize(
    ("text", "value", "mark", "unit", "whole", "words"),
    [
        ("5", 5, "", False, False, None), ("5%", 5, "%", False, False, None), (r"5^\circ", 5, "°", False, False, None),
        (r"5^\circ C", 5, "°", False, False, None), (r"30^\circ 30'", Fraction(61, 2), "°", False, False, None),
        (r"36''", Fraction(1, 100), "°", False, False, None), (r"5 \text{ km}", 5, "", True, False, None),
        ("5 km", 5, "", True, True, None), (r"5 \text{ dogs}", 5, "", False, False, None),
        (r"\text{five}", 5, "", False, False, "five"), (r"\text{about } 5", 5, "", False, False, None),
        ("21st", 21, "", False, False, None), (r"\text{Tiger}", None, "", False, False, "tiger"),
        (r"\int x", None, "", False, False, None), ("", None, "", False, False, None),
    ],
)  # fmt: skip
def test_a_scalar_is_read_once(
    text: str, value: int | Fraction | None, mark: str, unit: bool, whole: bool, words: str | None
) -> None:
    reading = read(text)
    assert (None if reading.node is None else rational_value(reading.node)) == value
    assert (reading.mark, reading.unit is not None, reading.whole is not None) == (mark, unit, whole)
    assert reading.words == words


@pytest.mark.parametrize(
    ("gold", "same", "different", "undecided"),
    [
        ("B",
         ["B", "(B)", "B.", "(b)", "(B) 12", "B. 12"],
         ["b", "C", "(C)", "C) 12", "(B) (C)", "(A) 1 (B) 2"],
         ["12"]),
        ("(B)", ["b"], [], []),
        ("12", [], [], ["B"]),
        ("(B) 12", ["B", "(B) 12"], ["C"], ["b", "12"]),
        (r"\text{(B)}", ["B"], [], []),
    ],
)  # fmt: skip
def test_a_choice_is_compared_as_one(gold: str, same: list[str], different: list[str], undecided: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False) | dict.fromkeys(undecided)
    assert {answer: choice_letters(gold, answer) for answer in expected} == expected


def test_choices_and_constants_are_told_from_other_answers() -> None:
    assert [text for text in ("B", "(B)", "B.", "b", "K", "BC", "12") if is_choice(text)] == ["B", "(B)", "B."]
    assert constant(r"\frac{2}{4}") == Fraction(1, 2)
    assert [constant(text) for text in ("x", r"\pi", "1/0", r"\int", "9^{9^9}")] == [None] * 5
    assert has_letters("2x")
    assert not has_letters("2")
    assert not has_letters(r"\text{tiger}")
