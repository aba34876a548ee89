"""Units behind values: where the value ends, and what a unit is worth."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gxpo_trainer.verify.units import Unit, parse_unit, split_unit
from gxpo_trainer.verify.words import number_from_words


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5 cm^2", "5", "cm^2"),
        ("12 dogs", "12", "dogs"),
        ("30 m/s", "30", "m/s"),
        ("15m/s", "15", "m/s"),
        ("7 square feet", "7", "square feet"),
        ("5 m", "5", "m"),
        ("0.64N", "0.64", "N"),
        (r"2.5 \Omega", "2.5", r"\Omega"),
        (r"24 \text{km}\cdot h^{-1}", "24", r"\text{km}\cdot h^{-1}"),
        ("3xyz", "3xyz", ""),
        ("6m", "6m", ""),
        ("2ab", "2ab", ""),
        (r"\pi r", r"\pi r", ""),
        ("apples", "apples", ""),
    ],
)
def test_units_are_told_from_products_of_letters(text: str, value: str, unit: str) -> None:
    assert split_unit(text) == (value, unit)


@pytest.mark.parametrize(
    ("text", "size", "dimension"),
    [
        ("km/h", Fraction(5, 18), {("m", 1), ("s", -1)}),
        ("miles per hour", Fraction(1609344, 3600000), {("m", 1), ("s", -1)}),
        (r"\text{square feet}", Fraction(3048, 10000) ** 2, {("m", 2)}),
        ("meters squared", Fraction(1), {("m", 2)}),
        (r"N\cdot m", Fraction(1), {("kg", 1), ("m", 2), ("s", -2)}),
        ("μm", Fraction(1, 10**6), {("m", 1)}),
        ("minutes", Fraction(60), {("s", 1)}),
        ("cents", Fraction(1, 100), {("dollar", 1)}),
        ("cm/cm", Fraction(1), set()),
    ],
)
def test_units_have_a_size_and_a_dimension(text: str, size: Fraction, dimension: set[tuple[str, int]]) -> None:
    assert parse_unit(text) == Unit(size, frozenset(dimension))


@pytest.mark.parametrize("text", ["", "dogs", "cm of rope", "5"])
def test_other_words_are_no_units(text: str) -> None:
    assert parse_unit(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("four", 4),
        ("twenty-one", 21),
        ("three hundred and five", 305),
        ("two thousand", 2000),
        ("one half", Fraction(1, 2)),
        ("three quarters", Fraction(3, 4)),
        ("east", None),
        ("and", None),
        ("x", None),
    ],
)
def test_number_words_are_numbers(text: str, value: Fraction | None) -> None:
    assert number_from_words(text) == value
