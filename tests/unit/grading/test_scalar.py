"""Equality of single values: percent, degrees, units, words, bases, times, ratios, choices; and readings of them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.equality import rational_value
from gxpo_trainer.grading.latex import clean
from gxpo_trainer.grading.scalar import choice_letters, has_letters, read, scalars_equal
from gxpo_trainer.grading.units import Unit, number_from_words, parse_unit, split_unit


@pytest.mark.parametrize(
    ("gold", "same", "different"),
    [
        # Percent and degrees: stated on one side only, the bare side may mean either.
        ("28%", ["28%", "28", "0.28", r"\frac{7}{25}"], ["0.28%", "2.8"]),
        ("0.28", ["28%"], []),
        (r"90^\circ", ["90", r"\frac{\pi}{2}", r"\frac{\pi}{2}\text{ rad}"], [r"\pi", r"\pi \text{ rad}"]),
        (r"\frac{\pi}{2}", [r"90^\circ"], []),
        (r"100^\circ C", ["100", r"100^\circ"], [r"100^\circ F", "100 K", r"100\text{ radians}"]),
        # Words that make it another number, or none; digits or words for large ones.
        ("2", [r"2\text{ (double root)}", r"2\text{ more than before}", r"2\text{ up to a sign}"], ["twice 2"]),
        ("5", [r"\text{exactly } 5"], [r"\text{at least } 5", "less than 5", r"\text{not } 5", r"5\text{ or more}",
                                      r"\text{half of } 5", r"5\text{ dozen}", "5 hundred", "negative 5"]),
        (r"\text{at least } 5", ["at least 5"], ["5", r"\text{at most } 5"]),
        ("-5", [r"\text{negative } 5", "minus 5"], []),
        ("500", ["5 hundred", "five hundred"], ["five hundred one"]),
        ("1.6 x 10^-19", [r"1.6 \times 10^{-19}", "1.6e-19"], [r"1.6 \times 10^{-18}"]),
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
        (r"\text{tiger}", [], ["5", r"\text{none}"]),
        ("5", [], [r"\text{tiger}"]),
        (r"\text{none}", [r"\emptyset"], [r"\text{tiger}"]),
        # Letters with an operator or a prime between are algebra, words with a hyphen or an apostrophe are words.
        ("R-r", ["R - r", "-r + R"], ["r-R", "Rr"]),
        ("T-t", ["T - t"], ["t-T"]),
        ("n-k", [], ["nk"]),
        ("x-y", ["-y + x"], ["xy", "y-x"]),
        ("a-b-c", ["a-c-b"], ["abc"]),
        ("f'", ["f'"], ["f"]),
        ("y''", [], ["y", "y'"]),
        ("A'B", ["A'B"], ["AB'"]),
        ("a:b", ["a/b"], ["ab"]),
        ("A-B", ["A-B"], ["AB", "B-A"]),
        ("x-axis", ["X axis"], ["y-axis"]),
        ("don't", ["dont"], []),
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
        ("2 to 3", ["2:3"], ["3 to 2", "3:2"]),
        # Times of day.
        ("7:05", ["07:05", "7:05:00", "7:05 a.m."], ["7:06", "7:05:01"]),
        ("7:05 p.m.", ["7:05 PM", "7:05", "7:05:00"], ["7:05 a.m.", "8:05", "7:05:01"]),
        ("12:30 p.m.", ["12:30"], []),
        ("7 p.m.", ["7:00 p.m."], []),
    ],
)  # fmt: skip
def test_single_values_are_compared_for_what_they_say(gold: str, same: list[str], different: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False)
    assert {answer: scalars_equal(clean(gold), clean(answer)) for answer in expected} == expected


@pytest.mark.parametrize(
    ("text", "value", "mark", "unit", "words"),
    [
        ("5", 5, "", False, None), ("5%", 5, "%", False, None), (r"5^\circ C", 5, "°C", False, None),
        (r"5 \text{ km}", 5, "", True, None), ("5 km", 5, "", True, None), (r"5 \text{ dogs}", 5, "", False, None),
        (r"\text{five}", 5, "", False, "five"), (r"\text{about } 5", 5, "", False, None), ("21st", 21, "", False, None),
        (r"\text{Tiger}", None, "", False, "tiger"), (r"\int x", None, "", False, None), ("", None, "", False, None),
    ],
)  # fmt: skip
def test_a_scalar_is_read_once(text: str, value: int | None, mark: str, unit: bool, words: str | None) -> None:
    reading = read(text)
    assert (None if reading.node is None else rational_value(reading.node)) == value
    assert (reading.mark, reading.unit is not None, reading.words) == (mark, unit, words)
    assert [letters for letters in ("2x", "2", r"\text{tiger}") if has_letters(letters)] == ["2x"]


@pytest.mark.parametrize(
    ("gold", "same", "different", "undecided"),
    [
        ("B",
         ["B", "(B)", "B.", "(b)", "(B) 12", "B. 12"],
         ["b", "C", "(C)", "C) 12", "(B) (C)", "(A) 1 (B) 2"],
         ["12"]),
        ("(B)", ["b"], [], []),
        ("12", [], [], ["B"]),
        (r"\text{(B)}", ["B"], [], []),
    ],
)  # fmt: skip
def test_a_choice_is_compared_as_one(gold: str, same: list[str], different: list[str], undecided: list[str]) -> None:
    expected = dict.fromkeys(same, True) | dict.fromkeys(different, False) | dict.fromkeys(undecided)
    assert {answer: choice_letters(gold, answer) for answer in expected} == expected


# Units behind values: where the value ends, and what a unit is worth.


def test_units_are_told_from_products_of_letters() -> None:
    parts = {
        "5 cm^2": ("5", "cm^2"), "12 dogs": ("12", "dogs"), "30 m/s": ("30", "m/s"), "15m/s": ("15", "m/s"),
        "7 square feet": ("7", "square feet"), "5 m": ("5", "m"), "0.64N": ("0.64", "N"),
        r"2.5 \Omega": ("2.5", r"\Omega"), r"24 \text{km}\cdot h^{-1}": ("24", r"\text{km}\cdot h^{-1}"),
        "3xyz": ("3xyz", ""), "6m": ("6m", ""), "2ab": ("2ab", ""), r"\pi r": (r"\pi r", ""), "apples": ("apples", ""),
        "5 m s": ("5", "m s"), "5 kg m": ("5", "kg m"), "5 x m": ("5 x m", ""), "(3) m": ("(3)", "m"),
        r"\sqrt{3} m": (r"\sqrt{3}", "m"), "(3)m": ("(3)m", ""), "5m/s": ("5", "m/s"), "5 m^2": ("5", "m^2"),
        "5 m^{-2}.": ("5", "m^{-2}."), "5 per hour": ("5", "per hour"), "5 miles per hour": ("5", "miles per hour"),
        "5 cm of rope": ("5", "cm of rope"), "5 brrr": ("5 brrr", ""), "5 abc": ("5 abc", ""),
        "5 apples": ("5", "apples"), "5apples": ("5apples", ""), "5cm": ("5", "cm"), r"5 \text{x}": ("5", r"\text{x}"),
        r"\text{x}": (r"\text{x}", ""), r"x \text{ cm}": ("x", r"\text{ cm}"), "5% of": ("5", "% of"),
        r"x\Omega": (r"x\Omega", ""), r"\pi m": (r"\pi m", ""), r"2\pi  cm ": (r"2\pi", "cm"),
    }  # fmt: skip
    assert {text: split_unit(text) for text in parts} == parts
    assert split_unit("5" + " m" * 31) == ("5 m", " ".join("m" * 30)), "each word takes a search"


def test_units_have_a_size_and_a_dimension() -> None:
    units = {
        "km/h": (Fraction(5, 18), {("m", 1), ("s", -1)}),
        "miles per hour": (Fraction(1609344, 3600000), {("m", 1), ("s", -1)}),
        r"\text{square feet}": (Fraction(3048, 10000) ** 2, {("m", 2)}), "meters squared": (Fraction(1), {("m", 2)}),
        r"N\cdot m": (Fraction(1), {("kg", 1), ("m", 2), ("s", -2)}), "μm": (Fraction(1, 10**6), {("m", 1)}),
        "minutes": (Fraction(60), {("s", 1)}), "cents": (Fraction(1, 100), {("dollar", 1)}),
        "cm/cm": (Fraction(1), set()), "m^2/s^2": (Fraction(1), {("m", 2), ("s", -2)}),
        "cubic centimeters": (Fraction(1, 10**6), {("m", 3)}),
        "kPa": (Fraction(1000), {("kg", 1), ("m", -1), ("s", -2)}), "kilograms": (Fraction(1), {("kg", 1)}),
        "mm": (Fraction(1, 1000), {("m", 1)}), "MHz": (Fraction(10**6), {("s", -1)}),
        "Meters": (Fraction(1), {("m", 1)}), "Days": (Fraction(86400), {("s", 1)}),
        "days": (Fraction(86400), {("s", 1)}), "feet": (Fraction(3048, 10000), {("m", 1)}),
        "kph": (Fraction(5, 18), {("m", 1), ("s", -1)}), r"\mu\text{s}": (Fraction(1, 10**6), {("s", 1)}),
        r"k\Omega": (Fraction(1000), {("kg", 1), ("m", 2), ("s", -3), ("A", -2)}), "m^9": (Fraction(1), {("m", 9)}),
        "square meters per square seconds": (Fraction(1), {("m", 2), ("s", -2)}),
    }  # fmt: skip
    expected = {text: Unit(size, frozenset(dimension)) for text, (size, dimension) in units.items()}
    assert {text: parse_unit(text) for text in units} == expected
    for other in ("", "dogs", "cm of rope", "5", "m^10", "M", "Kg", "DAY?", "s!", "ms s x", "has"):
        assert parse_unit(other) is None


def test_number_words_are_numbers() -> None:
    values = {
        "four": 4, "twenty-one": 21, "zero": 0, "nineteen": 19, "ninety-nine": 99, "hundred": 100,
        "thousand": 1000, "one hundred": 100, "two hundred five": 205, "three million two thousand sixty-one": 3002061,
        "fifteen hundred": 1500, "twenty zero": None, "one two": None, "twenty thirty": None, "ten five": None,
        "thousand million": None, "one hundred zero": 100, "hundred hundred": None,
        "two 3": None, "two dogs": None, "east": None, "and": None, "x": None,
    }  # fmt: skip
    assert {text: number_from_words(text) for text in values} == values
