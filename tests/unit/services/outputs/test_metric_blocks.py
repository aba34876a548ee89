"""Metric values as bytes, against a plain dictionary."""

from __future__ import annotations

import math
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gxpo_services.outputs.metrics import BLOCK_STEPS, RECORD, decode, encode, one_history

STEPS = st.integers(0, 5 * BLOCK_STEPS) | st.integers(2**31 - 3, 2**31 - 1)
ROWS = st.lists(st.tuples(STEPS, st.dictionaries(st.sampled_from("abc"), st.floats(), max_size=3)), max_size=60)


def bits(value: float) -> bytes:
    """Tells -0.0 from 0.0, and compares NaN; which NaN it is does not matter."""
    return struct.pack("<d", math.nan if math.isnan(value) else value)


def pairs(records: np.ndarray) -> list[tuple[int, bytes]]:
    return [(int(step), bits(float(value))) for step, value in records.tolist()]


def test_a_record_is_a_little_endian_int32_and_a_float64() -> None:
    data = encode([(3, {"m": 1.5}), (4, {"m": -0.25})])
    assert data == {("m", 0): struct.pack("<id", 3, 1.5) + struct.pack("<id", 4, -0.25)}
    assert RECORD.itemsize == 12


def test_a_block_holds_128_steps() -> None:
    keys = encode([(127, {"m": 1.0}), (128, {"m": 2.0}), (256, {"m": 3.0})]).keys()
    assert keys == {("m", 0), ("m", 1), ("m", 2)}


@given(ROWS, ROWS)
def test_what_was_appended_in_two_parts_reads_as_a_dictionary_would(first: list, second: list) -> None:
    stored: dict[tuple[str, int], bytes] = {}
    expected: dict[str, dict[int, float]] = {}
    for rows in (first, second):
        for key, data in encode(rows).items():
            stored[key] = stored.get(key, b"") + data
        for step, metrics in rows:
            for name, value in metrics.items():
                expected.setdefault(name, {})[step] = value
    for name in "abc":
        blocks = [stored[key] for key in sorted(stored) if key[0] == name]
        assert pairs(decode(blocks)) == [(s, bits(v)) for s, v in sorted(expected.get(name, {}).items())]


@given(
    st.dictionaries(st.integers(1, 5), st.dictionaries(st.integers(0, 30), st.floats(allow_nan=False), min_size=1)),
    st.dictionaries(st.integers(1, 5), st.integers(0, 30)),
)
def test_history_is_what_no_later_attempt_replaced(values: dict[int, dict[int, float]], others: dict[int, int]) -> None:
    """`others`: attempts that reported, from that step on, metrics other than this one too."""
    firsts = {a: min([*values.get(a, {}), *([others[a]] if a in others else [])]) for a in {*values, *others}}
    expected: dict[int, float] = {}
    for attempt in sorted(firsts):
        expected = {step: value for step, value in expected.items() if step < firsts[attempt]}
        expected |= values.get(attempt, {})
    records = {a: np.array(sorted(rows.items()), dtype=RECORD) for a, rows in values.items()}
    assert pairs(one_history(records, firsts)) == [(s, bits(v)) for s, v in sorted(expected.items())]


def test_an_empty_history_has_no_records() -> None:
    assert len(one_history({}, {1: 0})) == 0
    assert len(decode([])) == 0
