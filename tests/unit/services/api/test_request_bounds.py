"""Bounds of requests, strict JSON, cursors and ranges: what comes from outside is read strictly."""

from __future__ import annotations

import base64
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support.bounds import bounds, unbounded

from gxpo_services.api.errors import Invalid, RangeNotSatisfiable
from gxpo_services.api.fields import MAX_VALUES, Body, Kind, decode_cursor, encode_cursor, faults, new_id, read_json
from gxpo_services.app import create_app
from gxpo_services.outputs.checkpoints import requested_range
from gxpo_services.settings import ServiceSettings

FREE_FORM = {
    # `faults` bounds configs; ingest/batches.py bounds what trainers report.
    *(f"post {path}config" for path in ("runs ", "runs/validate ", "sweeps base.", "sweeps/validate base.")),
    *(f"post runs/{{run_id}}/ingest {member}" for member in ("", "identity", "outcome")),
    *(f"post runs/{{run_id}}/ingest {kind}[]" for kind in ("metrics", "samples", "evaluations", "events")),
}


LIMITS = """
maxItems 100: seeds
maxItems 10000: evaluations, events, metrics, samples
maxItems 20: state, tag, tags
maxItems 20 | maxLength 100000 | minimum -9223372036854775808 maximum 9223372036854775808: grid.*[]
maxItems 200: base.overrides, groups, overrides
maxItems 200 | maxItems 500 | minItems 1 maxItems 200 | minItems 1 maxItems 500: runs
maxItems 50: budgets, with_metric, with_setting
maxLength 100: base.preset, if-none-match, owner, preset
maxLength 1000: baseline, budgets[], if-match
maxLength 100000 | minimum -9223372036854775808 maximum 9223372036854775808: grid.*[][]
maxLength 120: actor
maxLength 20: verdict
maxLength 200: Range, benchmark, if-range, phase, rule, text, x, y
maxLength 2000: cursor
maxLength 20000: groups[], names[], notes, runs[]
maxLength 200000: base.toml, toml
maxLength 207: sort
maxLength 300: prompt_id
maxLength 400: model
maxLength 60: kind
maxProperties 8: grid
maximum 36500 exclusiveMinimum 0: days
minItems 1 maxItems 100: grid.*
minItems 1 maxItems 4: parts
minItems 1 maxItems 500: names
minLength 1 maxLength 100 | minLength 1 maxLength 200: name
minLength 1 maxLength 200: with_metric[], with_setting[]
minLength 1 maxLength 2000: base.overrides[], overrides[]
minLength 1 maxLength 60: tag[], tags[]
minimum -1 maximum 2147483647 | minimum 0 maximum 100000000000 | minimum 0 maximum 9223372036854775808: after
minimum 0 maximum 9223372036854775808 default 0: after
minimum -1000 maximum 1000 | minimum -1000 maximum 1000 default 0: priority
minimum -9223372036854775808 maximum 9223372036854775808 default 0: offset
minimum 0 exclusiveMaximum 1: sampling_share
minimum 0 exclusiveMaximum 1 default 0: smoothing
minimum 0 maximum 100000000000: before, created_after, created_before
minimum 0 maximum 2147483647: group, sample, step
minimum 0 maximum 2147483647 default 0: offsets.evaluations, offsets.events, offsets.metrics, offsets.samples
minimum 0 maximum 9223372036854775808: last-event-id, seeds[]
minimum 1 maximum 1000 default 200 | minimum 1 maximum 200 default 50 | minimum 1 maximum 500 default 50: limit
minimum 4 maximum 1048576 default 65536: limit
minimum 1 maximum 2147483647: attempt, batch
minimum 1 maximum 50 default 4: steps
minimum 4 maximum 20000 default 1000: max_points
"""
"""Bounds and defaults → members and parameters; a narrower bound refuses what clients send today."""


def test_every_member_and_parameter_of_a_request_is_bounded(tmp_path: Path) -> None:
    description = create_app(ServiceSettings(home=tmp_path)).openapi()
    schemas = description["components"]["schemas"]
    found, limits = set(), defaultdict[str, set[str]](set)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            contents = operation.get("requestBody", {}).get("content", {}).values()
            parts = [("", content["schema"]) for content in contents]
            parts += [(parameter["name"], parameter["schema"]) for parameter in operation.get("parameters", ())]
            where = f"{method} {path.removeprefix('/api/v1/')}"
            for name, part in parts:
                found |= {f"{where} {place}" for place in unbounded(part, schemas, name)}
                for place, limit in bounds(part, schemas, name):
                    limits[place].add(limit)
    assert found == {f"{place}: object" for place in FREE_FORM}
    written = defaultdict[str, set[str]](set)
    for line in LIMITS.strip().splitlines():
        limit, places = line.split(": ")
        for place in places.split(", "):
            written[place].update(limit.split(" | "))
    assert limits == written


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "[-Infinity]", '{"a": 1e999}', "-1e999", "9" * 400 + ".0", "9" * 5000, "[" * 65 + "]" * 65),
        *('{"a":' * 65 + "1" + "}" * 65, "[" * 200_000, "", "nul", "[1,]", "\ufeff{}"),
    ],
)
def test_what_is_no_strict_json_is_a_value_error(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            read_json(form)


def test_strict_json_is_read_as_the_standard_library_reads_it() -> None:
    value = {"a": [1, -2.5, 1e308, True, None, "NaN", "1e999", {"b": "\u00e9"}], "big": 9 * 10**399}
    assert read_json(json.dumps(value)) == value
    assert read_json("[" * 64 + "]" * 64) == json.loads("[" * 64 + "]" * 64)
    assert read_json("7") == 7
    with pytest.raises(ValueError, match=r"^9{40} is not a JSON number"):
        read_json("9" * 400 + ".0")
    with pytest.raises(UnicodeDecodeError):
        read_json(b'"\xff"')


def test_every_request_body_is_strict() -> None:
    assert all(kind.model_config["strict"] and kind.model_config["extra"] == "forbid" for kind in Body.__subclasses__())


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"a": 1}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_free_form_json_is_bounded_in_depth_keys_and_number_of_values() -> None:
    assert faults(nested(32)) == []
    assert faults(nested(33)) == [(".".join("a" * 33), "is nested deeper than 32 levels")]
    assert faults(json.loads("[" * 33 + "]" * 33)) == []
    assert faults(json.loads("[" * 34 + "]" * 34)) == [("[0]" * 33, "is nested deeper than 32 levels")]
    assert faults({"k" * 100: [1]}) == []
    assert faults({"x": [0] * (MAX_VALUES - 2)}) == [], "the list and the object are values too"
    assert faults({"x": [0] * (MAX_VALUES - 1)}) == [("", f"has more than {MAX_VALUES} values")]
    assert faults({"\ud800": 1, "x": {"a\0": 1}}) == [(p, "has a key that cannot be stored") for p in ("", "x")]
    # The work of checking is bounded whatever the shape.
    assert faults({"x": [{"a": 0}] * (MAX_VALUES + 1)}) == [("x", f"has more than {MAX_VALUES} values")]
    assert faults({"x": [[0] * 1000] * 1000}) == [("", f"has more than {MAX_VALUES} values")]
    # A long key would be part of the path of every value below it: 4 MB × 2 million values.
    assert faults({"k" * 4_000_000: [0] * 2_000_000}) == [("", "has a key of more than 100 characters")]
    assert len(faults({str(number): "\0" for number in range(1000)})) == 100
    assert faults({"ok": [1, 2.5, "text", None, math.inf]}) == []


# The Range header, by hand on a file of ten bytes.


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=9-9", (9, 10)),
        ("bytes=3-999", (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-999", (0, 10)),
        # A server may ignore what it does not understand, and several ranges.
        (None, None),
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
    ],
)
def test_a_range_of_ten_bytes(header: str | None, part: tuple[int, int] | None) -> None:
    assert requested_range(header, 10) == part
    for behind in ("bytes=10-", "bytes=10-20", "bytes=-0"):
        with pytest.raises(RangeNotSatisfiable):
            requested_range(behind, 10)


# Cursors give back what they were made of, and nothing else gets in.


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@given(st.none() | st.floats(allow_nan=False), TEXTS, st.integers(0, 2**63 - 1))
def test_floats_infinities_and_texts_come_back_exactly(value: float | None, text: str, number: int) -> None:
    assert decode_cursor(encode_cursor("-score", value, number), "-score", "float") == (value, number)
    assert decode_cursor(encode_cursor("+name", text, number), "+name", "text") == (text, number)


@pytest.mark.parametrize(("kind", "most"), [("int32", 2**31 - 1), ("int64", 2**63 - 1)])
def test_whole_numbers_of_a_column_come_back_exactly(kind: Kind, most: int) -> None:
    for value in (None, 0, 1, -1, most, -most):
        assert decode_cursor(encode_cursor("+x", value, 0), "+x", kind) == (value, 0)
    for value in (most + 1, -most - 1, 1.0, True, "1"):
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
        (made_of("+x", 1.0, -1), "float"),
        (made_of("+x", 1.0, "1"), "float"),
        (made_of("+x", 1.0, 2**63), "float"),
        (made_of("+x", 1.0), "float"),
        ("", "float"),
        ("%%%", "float"),
        ("[" * 2000, "float"),
        (base64.urlsafe_b64encode(b'{"a": 1, "b": 2, "c": 3}').decode(), "float"),
    ],
)
def test_what_no_list_gave_is_refused(cursor: str, kind: Kind) -> None:
    with pytest.raises(Invalid, match=r"not a cursor of this list|another order"):
        decode_cursor(cursor, "+x", kind)


@given(st.text(max_size=200))
def test_any_text_is_refused_and_a_cursor_of_another_order_says_so(cursor: str) -> None:
    with pytest.raises(Invalid):
        decode_cursor(cursor, "a sort that no random text names", "float")
    with pytest.raises(Invalid, match="belongs to another order") as caught:
        decode_cursor(encode_cursor("+name", "a", 1), "-name", "text")
    assert caught.value.errors[0].field == "cursor"
