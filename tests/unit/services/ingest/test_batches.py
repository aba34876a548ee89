"""What a trainer may send: each bad row is named, and refuses the batch."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.reporting import EPISODE, body, evaluation_row, event_row, metric_row, sample_row

from gxpo_services.api.errors import Invalid, TooLarge
from gxpo_services.ingest.batches import MOST_ROWS, parse, read_json


def parsed(content: Any) -> Any:
    return parse(json.dumps(content).encode())


def test_the_words_for_what_json_lacks_become_numbers_and_a_row_left_out_is_null() -> None:
    batch = parsed(body(1, metrics=[None, metric_row(5, a=math.nan, b=-math.inf, c=2, d=math.inf)], evaluations=[None]))
    left_out, row = batch.rows["metrics"]
    assert (left_out, list(batch.rows["evaluations"])) == (None, [None])
    assert (row.attempt, row.step) == (1, 5)
    assert math.isnan(row.values["a"])
    assert {name: row.values[name] for name in "bcd"} == {"b": -math.inf, "c": 2.0, "d": math.inf}


def test_what_a_line_has_beside_the_columns_is_kept() -> None:
    batch = parsed(body(1, samples=[sample_row(3, components={"format": 0.5})], events=[event_row("x", "y", step=3)]))
    assert batch.rows["samples"][0]["extra"] == {"detail": "", "weights_version": 0, "components": {"format": 0.5}}
    assert batch.rows["samples"][0]["group_index"] == 0
    assert batch.rows["events"][0] == {"time": 3.25, "kind": "x", "message": "y", "fields": {"step": 3}}


def test_a_missing_answer_has_no_extract_and_no_reward() -> None:
    for reward in (None, "NaN"):
        (row,) = parsed(body(1, samples=[sample_row(1, extracted=None, reward=reward)])).rows["samples"]
        assert (row["extracted"], row["reward"]) == (None, None)


def test_a_heartbeat_may_carry_a_phase() -> None:
    assert parsed(body(None) | {"phase": "waiting for 3 GPUs"}).phase == "waiting for 3 GPUs"
    assert parsed(body(None)).phase is None
    for bad in (3, ["x"], "x" * 201):
        with pytest.raises(Invalid, match="phase"):
            parsed(body(None) | {"phase": bad})


def test_an_episode_has_columns_of_its_own_and_a_single_turn_has_none() -> None:
    (row, without) = parsed(body(1, samples=[sample_row(1, **EPISODE), sample_row(1)])).rows["samples"]
    assert row["turns"] == EPISODE["turns"]
    assert (row["end"], row["end_detail"], row["sampled_length"]) == ("done", None, 11)
    assert [without[name] for name in EPISODE] == [None] * 4
    assert row["extra"] == without["extra"] == {"detail": "", "weights_version": 0}


TURN = {"speaker": "policy", "text": "x", "reward": None}

BAD: list[tuple[str, Any, str]] = [
    ("metrics", {"attempt": 1, "step": -1, "time": 1, "metrics": {}}, "step"),
    ("metrics", {"attempt": 1, "step": True, "time": 1, "metrics": {}}, "step"),
    ("metrics", {"attempt": 1, "step": 1.0, "time": 1, "metrics": {}}, "step"),
    ("metrics", {"attempt": 1, "step": 1, "time": 1, "metrics": [1]}, "metrics"),
    ("metrics", metric_row(1, a="nan"), "not a number"),
    ("metrics", metric_row(1, a=True), "not a number"),
    ("metrics", metric_row(1, a="x" * 60), "'x{40}' is not a number"),
    ("metrics", metric_row(1, a=10**400), "not a number"),
    ("metrics", metric_row(1, **{"n" * 201: 1.0}), "must be at most 200 characters"),
    ("metrics", metric_row(1, **{"": 1.0}), "must not be empty"),
    ("metrics", [], "object"),
    ("samples", sample_row(1, prompt_id="p" * 301), "prompt_id"),
    ("samples", sample_row(1, response="x" * 1_000_001), "response"),
    ("samples", sample_row(1, truncated="no"), "truncated"),
    ("samples", sample_row(1, **EPISODE | {"turns": ["hello"]}), "object"),
    ("samples", sample_row(1, **EPISODE | {"turns": [{"speaker": "tool", "text": ""}]}), "speaker"),
    ("samples", sample_row(1, **EPISODE | {"turns": [{"speaker": "policy", "text": 4}]}), "text"),
    ("samples", sample_row(1, **EPISODE | {"turns": [{"speaker": "policy", "text": "", "reward": "NaN"}]}), "finite"),
    ("samples", sample_row(1, **EPISODE | {"turns": [TURN] * 10_001}), "at most 10000"),
    ("samples", sample_row(1, **EPISODE | {"end": None}), "end"),
    ("evaluations", evaluation_row(1, scores={"a": "b"}), "not a number"),
    ("evaluations", evaluation_row(1, benchmark="b" * 201), "benchmark"),
    ("events", event_row("k" * 61), "kind"),
    ("events", event_row("state", new="failed", reason="diverged"), "kind state is for events of the service"),
    ("events", event_row("k", time="NaN"), "time"),
]


@pytest.mark.parametrize(("kind", "row", "named"), BAD)
def test_a_bad_row_is_named(kind: str, row: Any, named: str) -> None:
    good = {"metrics": metric_row(1), "samples": sample_row(1), "evaluations": evaluation_row(1)}
    content = body(1)
    content[kind] = [good.get(kind, event_row("k")), row]
    with pytest.raises(Invalid, match=named) as caught:
        parsed(content)
    assert caught.value.errors[0].field.startswith(f"{kind}[1]")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"attempt": NaN}',
        b"\xff",
        b'{"attempt": 1, "batch": 0}',
        b'{"attempt": 1, "batch": 1, "metrics": [null]}',
        b'{"attempt": 1, "batch": null, "metrics": [null]}',
        b'{"attempt": 1, "batch": 1, "offsets": {"metrics": -1}}',
        b'{"attempt": 1, "batch": 1, "identity": 4}',
        b'{"attempt": 1, "batch": 1, "outcome": {"attempt": 1, "outcome": "bored"}}',
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(Invalid):
        parse(data)


def test_the_longest_rows_are_accepted() -> None:
    metrics = {"n" * 200: 0.5} | {f"n{i}": 1.0 for i in range(20_000)}
    sample = sample_row(0, prompt_id="p" * 300, response="x" * 1_000_000, verdict="v" * 20, length=2**31 - 1)
    event = event_row("k" * 60, "m" * 20_000, deep=json.loads("[" * 31 + "]" * 31))
    evaluation = evaluation_row(0, benchmark="b" * 200)
    rows = {"metrics": [metric_row(0, **metrics)], "samples": [sample], "evaluations": [evaluation], "events": [event]}
    batch = parsed(body(1, **rows))
    assert batch.rows["metrics"][0].values == metrics
    assert batch.rows["samples"][0]["verdict"] == "v" * 20
    assert len(parsed(body(1, metrics=[None] * MOST_ROWS)).rows["metrics"]) == MOST_ROWS
    with pytest.raises(TooLarge, match="at most 10000"):
        parsed(body(1, metrics=[None] * (MOST_ROWS + 1)))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_texts_are_made_storable_to_the_depth_that_json_may_have(opening: str, closing: str) -> None:
    def read(depth: int, text: str) -> str:
        return json.dumps(read_json((opening * depth + text + closing * depth).encode(), "body"), ensure_ascii=False)

    assert read(64, r'"\ud83d\ude00"') == opening * 64 + '"\U0001f600"' + closing * 64
    assert read(64, r'"\u0000"') == opening * 64 + '"\ufffd"' + closing * 64
    with pytest.raises(Invalid, match="nested deeper than 64 levels"):
        read(65, r'"\u0000"')


def test_what_a_database_cannot_store_is_replaced_in_every_text() -> None:
    texts = {"response": "a\0b \ud800 \U0001f600", "gold": r"\u0000 is written as text", "extra\0": ["\udfff"]}
    content = body(1, samples=[sample_row(1, **texts)], metrics=[metric_row(1, **{"a\0b": 1.0})])
    batch = parsed(content | {"outcome": {"attempt": 1, "outcome": "failed", "message": "\0"}})
    (sample,), (metric,) = batch.rows["samples"], batch.rows["metrics"]
    assert (sample["response"], sample["gold"]) == ("a\ufffdb \ufffd \U0001f600", texts["gold"])
    assert (sample["extra"]["extra\ufffd"], metric.values) == (["\ufffd"], {"a\ufffdb": 1.0})
    assert batch.outcome is not None
    assert batch.outcome.message == "\ufffd"
