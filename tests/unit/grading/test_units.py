"""Units behind values: where the value ends, and what a unit is worth."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.grading.units import Unit, number_from_words, parse_unit, split_unit


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5 cm^2", "5", "cm^2"), ("12 dogs", "12", "dogs"), ("30 m/s", "30", "m/s"), ("15m/s", "15", "m/s"),
        ("7 square feet", "7", "square feet"), ("5 m", "5", "m"), ("0.64N", "0.64", "N"),
        (r"2.5 \Omega", "2.5", r"\Omega"), (r"24 \text{km}\cdot h^{-1}", "24", r"\text{km}\cdot h^{-1}"),
        ("3xyz", "3xyz", ""), ("6m", "6m", ""), ("2ab", "2ab", ""), (r"\pi r", r"\pi r", ""), ("apples", "apples", ""),
        ("5 m s", "5", "m s"), ("5 kg m", "5", "kg m"), ("5 x m", "5 x m", ""), ("(3) m", "(3)", "m"),
        (r"\sqrt{3} m", r"\sqrt{3}", "m"), ("(3)m", "(3)m", ""), ("5m/s", "5", "m/s"), ("5 m^2", "5", "m^2"),
        ("5 m^{-2}.", "5", "m^{-2}."), ("5 per hour", "5", "per hour"), ("5 miles per hour", "5", "miles per hour"),
        ("5 cm of rope", "5", "cm of rope"), ("5 brrr", "5 brrr", ""), ("5 abc", "5 abc", ""),
        ("5 apples", "5", "apples"), ("5apples", "5apples", ""), ("5cm", "5", "cm"), (r"5 \text{x}", "5", r"\text{x}"),
        (r"\text{x}", r"\text{x}", ""), (r"x \text{ cm}", "x", r"\text{ cm}"), ("5% of", "5", "% of"),
        (r"x\Omega", r"x\Omega", ""), (r"\pi m", r"\pi m", ""), (r"2\pi  cm ", r"2\pi", "cm"),
    ],
)  # fmt: skip
def test_units_are_told_from_products_of_letters(text: str, value: str, unit: str) -> None:
    assert split_unit(text) == (value, unit)


@pytest.mark.parametrize(
    ("text", "size", "dimension"),
    [
        ("km/h", Fraction(5, 18), {("m", 1), ("s", -1)}),
        ("miles per hour", Fraction(1609344, 3600000), {("m", 1), ("s", -1)}),
        (r"\text{square feet}", Fraction(3048, 10000) ** 2, {("m", 2)}), ("meters squared", Fraction(1), {("m", 2)}),
        (r"N\cdot m", Fraction(1), {("kg", 1), ("m", 2), ("s", -2)}), ("μm", Fraction(1, 10**6), {("m", 1)}),
        ("minutes", Fraction(60), {("s", 1)}), ("cents", Fraction(1, 100), {("dollar", 1)}),
        ("cm/cm", Fraction(1), set()), ("m^2/s^2", Fraction(1), {("m", 2), ("s", -2)}),
        ("cubic centimeters", Fraction(1, 10**6), {("m", 3)}),
        ("kPa", Fraction(1000), {("kg", 1), ("m", -1), ("s", -2)}), ("kilograms", Fraction(1), {("kg", 1)}),
        ("mm", Fraction(1, 1000), {("m", 1)}), ("MHz", Fraction(10**6), {("s", -1)}),
        ("Meters", Fraction(1), {("m", 1)}), ("Days", Fraction(86400), {("s", 1)}),
        ("days", Fraction(86400), {("s", 1)}), ("feet", Fraction(3048, 10000), {("m", 1)}),
        ("kph", Fraction(5, 18), {("m", 1), ("s", -1)}), (r"\mu\text{s}", Fraction(1, 10**6), {("s", 1)}),
        (r"k\Omega", Fraction(1000), {("kg", 1), ("m", 2), ("s", -3), ("A", -2)}), ("m^9", Fraction(1), {("m", 9)}),
        ("square meters per square seconds", Fraction(1), {("m", 2), ("s", -2)}),
    ],
)  # fmt: skip
def test_units_have_a_size_and_a_dimension(text: str, size: Fraction, dimension: set[tuple[str, int]]) -> None:
    assert parse_unit(text) == Unit(size, frozenset(dimension))


@pytest.mark.parametrize("text", ["", "dogs", "cm of rope", "5", "m^10", "M", "Kg", "DAY?", "s!", "ms s x", "has"])
def test_other_words_are_no_units(text: str) -> None:
    assert parse_unit(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("four", 4), ("twenty-one", 21), ("three hundred and five", 305), ("two thousand", 2000),
        ("one half", Fraction(1, 2)), ("three quarters", Fraction(3, 4)), ("zero", 0), ("nineteen", 19),
        ("ninety-nine", 99), ("hundred", 100), ("two hundred", 200), ("thousand", 1000), ("one thousand and one", 1001),
        ("two thousand three hundred", 2300), ("two hundred thousand and twelve", 200_012),
        ("one million two thousand", 1_002_000), ("Two Million", 2_000_000), ("two thirds", Fraction(2, 3)),
        ("one third", Fraction(1, 3)), ("seven tenths", Fraction(7, 10)), ("two 3", None), ("two dogs", None),
        ("half", None), ("east", None), ("and", None), ("x", None),
    ],
)  # fmt: skip
def test_number_words_are_numbers(text: str, value: Fraction | None) -> None:
    assert number_from_words(text) == value
