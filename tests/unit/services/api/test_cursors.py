"""Cursors give back what they were made of, and nothing else gets in."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gxpo_services.api.errors import Invalid
from gxpo_services.api.fields import Kind, Position, decode_cursor, encode_cursor, new_id

NUMBERS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@given(st.none() | st.floats(allow_nan=False), NUMBERS)
def test_floats_and_infinities_come_back_exactly(value: float | None, number: int) -> None:
    assert decode_cursor(encode_cursor("-score", Position(value, number)), "-score", "float") == Position(value, number)


@given(TEXTS, NUMBERS)
def test_texts_come_back_exactly(value: str, number: int) -> None:
    assert decode_cursor(encode_cursor("+name", Position(value, number)), "+name", "text") == Position(value, number)


@pytest.mark.parametrize(("kind", "most"), [("int32", 2**31 - 1), ("int64", 2**63 - 1)])
def test_whole_numbers_of_a_column_come_back_exactly(kind: Kind, most: int) -> None:
    for value in (None, 0, 1, -1, most, -most):
        assert decode_cursor(encode_cursor("+x", Position(value, 0)), "+x", kind) == Position(value, 0)
    for value in (most + 1, -most - 1):
        with pytest.raises(Invalid):
            decode_cursor(made_of("+x", value, 1), "+x", kind)


def test_an_id_begins_with_its_time_in_base_32() -> None:
    # 1,000 ms = 31 × 32 + 8: digits z and 8 of Crockford's alphabet.
    made = new_id("r", now=1.0)
    assert made[:11] == "r00000000z8"
    assert len(made) == 21


def made_of(*body: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(body)).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("cursor", "kind"),
    [
        (made_of("+x", "text", 1), "float"),
        (made_of("+x", True, 1), "float"),
        (made_of("+x", 1.5, 1), "int32"),
        (made_of("+x", 5, 1), "text"),
        (made_of("+x", "a\x00b", 1), "text"),
        (made_of("+x", "\ud800", 1), "text"),
        (made_of("+x", 1.0, -1), "float"),
        (made_of("+x", 1.0, 2**63), "float"),
        (made_of("+x", 1.0, "1"), "float"),
        (made_of("+x", 1.0, None), "float"),
        (made_of("+x", [1.0], 1), "float"),
        (made_of("+x", 1.0), "float"),
        ("", "float"),
        ("%%%", "float"),
        ("é", "float"),
        ("[" * 2000, "float"),
        (base64.urlsafe_b64encode(b"[" * 1400).decode(), "float"),
        (base64.urlsafe_b64encode(b'{"a": 1, "b": 2, "c": 3}').decode(), "float"),
        (base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode(), "float"),
    ],
)
def test_what_no_list_gave_is_refused(cursor: str, kind: Kind) -> None:
    with pytest.raises(Invalid, match=r"not a cursor of this list|another order"):
        decode_cursor(cursor, "+x", kind)


@given(st.text(max_size=200))
def test_any_text_is_refused_or_read_and_never_crashes(cursor: str) -> None:
    with pytest.raises(Invalid):
        decode_cursor(cursor, "a sort that no random text names", "float")


def test_a_cursor_of_another_order_says_so() -> None:
    with pytest.raises(Invalid, match="belongs to another order") as caught:
        decode_cursor(encode_cursor("+name", Position("a", 1)), "-name", "text")
    assert caught.value.errors[0].field == "cursor"
