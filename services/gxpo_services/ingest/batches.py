"""Parsing of a trainer's batches: accepted as a whole, or rejected with the place of the invalid row. Pure.

Plain code instead of models: a batch has thousands of values, and validation would dominate its cost. A null row stands
for an omitted line; it counts as a line and has no content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from gxpo_services.api import fields
from gxpo_services.runs.lifecycle import Outcome
from gxpo_trainer.jsonl import decode_number

Kind = Literal["metrics", "samples", "evaluations", "events"]
KINDS: tuple[Kind, ...] = ("metrics", "samples", "evaluations", "events")
MOST_ROWS = 10_000
MOST_METRICS = 500
MOST_TURNS = 10_000
KINDS_OF_SERVICE = ("state", "recovery")
"""Kinds of events that a trainer may not report: alerts depend on them, and a trainer may run a submitter's code."""
SPEAKERS = ("policy", "environment")
LONGEST_NAME = 200
LONGEST_TEXT = 1_000_000
LONGEST_PHASE = 200
_MOST = 2**31 - 1
_ODD_TEXT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
"""Escapes of characters that a database cannot store: NUL and lone surrogates."""
_ODD_CHARACTER = re.compile(r"[\x00\ud800-\udfff]")


class BadRow(ValueError):
    """An invalid row or member of a batch. `place`: where, e.g. metrics[3]."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


class TooManyRows(ValueError):
    """More rows than one batch may have."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line of metrics.jsonl; NaN and the infinities are floats again."""

    attempt: int
    step: int
    values: dict[str, float]


Columns = dict[str, Any]
"""A row of the table of samples, evaluations or events."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the four files with their first line numbers.

    launch: of the sender. number: of the batch in this launch; None when only the offsets deduplicate it. phase: what
    the sender is doing; None when it does not say.
    """

    launch: int
    number: int | None
    phase: str | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)
    metrics: Sequence[MetricRow | None] = ()
    samples: Sequence[Columns | None] = ()
    evaluations: Sequence[Columns | None] = ()
    events: Sequence[Columns | None] = ()
    identity: dict[str, Any] | None = None
    outcome: Outcome | None = None

    def rows(self, kind: Kind) -> Sequence[Any]:
        rows: Sequence[Any] = getattr(self, kind)
        return rows


def parse(body: bytes) -> Batch:
    """The batch in a request's body. Raises BadRow, TooManyRows."""
    content = read_json(body)
    if isinstance(content, dict):
        replace_odd_characters(content.get("outcome"))
    check_texts(body, content, "body")
    if not isinstance(content, dict):
        raise BadRow("body", "must be a JSON object")
    number = content.get("batch")
    offsets, rows = _offsets(content), {kind: _rows(content, kind) for kind in KINDS}
    if number is None:
        if any(rows.values()) or content.get("identity") is not None or content.get("outcome") is not None:
            raise BadRow("batch", "must be a number from 1 unless the call is a heartbeat")
    else:
        _integer(content, "batch", "batch", lowest=1)
    for kind in KINDS:
        if rows[kind] and kind not in offsets:
            raise BadRow(f"offsets.{kind}", "must say how many lines come before these rows")
    return Batch(
        launch=_integer(content, "attempt", "attempt", lowest=1),
        number=number,
        phase=None if content.get("phase") is None else _text(content, "phase", "body", LONGEST_PHASE),
        offsets=offsets,
        identity=parse_identity(content.get("identity")),
        outcome=parse_outcome(content.get("outcome")),
        **{
            kind: [None if row is None else parse_row(kind, row, f"{kind}[{i}]") for i, row in enumerate(rows[kind])]
            for kind in KINDS
        },
    )


def read_json(data: bytes) -> Any:
    """Strict JSON. Raises BadRow."""
    try:
        return fields.read_json(data)
    except ValueError as error:
        raise BadRow("body", f"is not valid JSON ({error})") from None


def replace_odd_characters(outcome: Any) -> None:
    """Replace what a database cannot store in the message of an outcome: the reason of a failure must not be lost."""
    if isinstance(outcome, dict) and isinstance(outcome.get("message"), str):
        outcome["message"] = _ODD_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", outcome["message"])


def check_texts(data: bytes, content: Any, place: str) -> None:
    """Check that a database can store all texts of `content`, parsed from `data`. Raises BadRow."""
    if _ODD_TEXT.search(data):
        _check_texts(content, place)


def parse_row(kind: Kind, row: Any, place: str) -> Any:
    """The parsed form of one line. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow(place, "must be a JSON object")
    return _PARSERS[kind](row, place)


def parse_identity(value: Any) -> dict[str, Any] | None:
    """Content of run.json. Raises BadRow."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRow("identity", "must be a JSON object")
    return value


def parse_outcome(value: Any) -> Outcome | None:
    """Content of outcome.json. Raises BadRow."""
    if value is None:
        return None
    try:
        return Outcome.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRow(".".join(["outcome", *map(str, first["loc"])]), first["msg"]) from None


def _offsets(content: Mapping[str, Any]) -> dict[str, int]:
    offsets = content.get("offsets", {})
    if not isinstance(offsets, dict):
        raise BadRow("offsets", "must be an object of line counts")
    return {kind: _integer(offsets, kind, f"offsets.{kind}") for kind in KINDS if kind in offsets}


def _rows(content: Mapping[str, Any], kind: Kind) -> list[Any]:
    rows = content.get(kind, [])
    if not isinstance(rows, list):
        raise BadRow(kind, "must be a list of rows")
    if len(rows) > MOST_ROWS:
        raise TooManyRows(f"{kind} has {len(rows)} rows; send at most {MOST_ROWS} at a time")
    return rows


def _metric_row(row: dict[str, Any], place: str) -> MetricRow:
    metrics = row.get("metrics")
    if not isinstance(metrics, dict):
        raise BadRow(place, "metrics must be an object of numbers by name")
    if len(metrics) > MOST_METRICS:
        raise BadRow(place, f"has {len(metrics)} metrics; a row may have {MOST_METRICS}")
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if not 0 < len(name) <= LONGEST_NAME:
            raise BadRow(place, f"metric name {name[:40]!r}… must have 1 to {LONGEST_NAME} characters")
        values[name] = value if type(value) is float else _number(value, f"{place}.metrics[{name!r}]")
    return MetricRow(_integer(row, "attempt", place, lowest=1), _integer(row, "step", place), values)


def _sample(row: dict[str, Any], place: str) -> Columns:
    reward = row.get("reward")
    reward = None if reward is None else _number(reward, f"{place}.reward")
    if not isinstance(row.get("truncated"), bool):
        raise BadRow(place, "truncated must be true or false")
    columns = {
        "attempt": _integer(row, "attempt", place, lowest=1),
        "step": _integer(row, "step", place),
        "time": _time(row, place),
        "group_index": _integer(row, "group", place),
        "sample_index": _integer(row, "sample", place),
        "prompt_id": _text(row, "prompt_id", place, 300),
        "prompt": _text(row, "prompt", place),
        "response": _text(row, "response", place),
        "extracted": None if row.get("extracted") is None else _text(row, "extracted", place),
        "gold": _text(row, "gold", place),
        "verdict": _text(row, "verdict", place, 20),
        "reward": None if reward is None or math.isnan(reward) else reward,
        "length": _integer(row, "length", place),
        "truncated": row["truncated"],
        **_episode(row, place),
    }
    return columns | {"extra": _rest(row, {*columns, "group", "sample"})}


def _episode(row: dict[str, Any], place: str) -> Columns:
    """The columns of an episode in an environment; None in rows of one turn, and in those of older trainers."""
    turns = row.get("turns")
    if turns is None:
        return dict.fromkeys(("turns", "end", "end_detail", "sampled_length"))
    if not isinstance(turns, list) or len(turns) > MOST_TURNS:
        raise BadRow(place, f"turns must be a list of at most {MOST_TURNS} turns")
    return {
        "turns": [_turn(turn, f"{place}.turns[{index}]") for index, turn in enumerate(turns)],
        "end": _text(row, "end", place, 20),
        "end_detail": _text(row, "end_detail", place) if row.get("end_detail") else None,
        "sampled_length": _integer(row, "sampled_length", place),
    }


def _turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(place, "must be a JSON object")
    if turn.get("speaker") not in SPEAKERS:
        raise BadRow(place, f"speaker must be one of {', '.join(SPEAKERS)}")
    reward = turn.get("reward")
    reward = None if reward is None else _number(reward, f"{place}.reward")
    if reward is not None and not math.isfinite(reward):
        raise BadRow(place, "reward must be a finite number or null")
    return {"speaker": turn["speaker"], "text": _text(turn, "text", place), "reward": reward}


def _evaluation(row: dict[str, Any], place: str) -> Columns:
    scores = row.get("scores")
    if not isinstance(scores, dict):
        raise BadRow(place, "scores must be an object of numbers by name")
    for name, value in scores.items():
        _number(value, f"{place}.scores[{name[:40]!r}]")
    return {
        "attempt": _integer(row, "attempt", place, lowest=1),
        "step": _integer(row, "step", place),
        "benchmark": _text(row, "benchmark", place, 200),
        "record": row,
    }


def _event(row: dict[str, Any], place: str) -> Columns:
    if row.get("kind") in KINDS_OF_SERVICE:
        raise BadRow(place, f"kind {row['kind']} is for events of the service; choose another")
    columns = {
        "time": _time(row, place),
        "kind": _text(row, "kind", place, 60),
        "message": _text(row, "message", place, 20_000),
    }
    return columns | {"fields": _rest(row, {*columns})}


_PARSERS: dict[Kind, Callable[[dict[str, Any], str], Any]] = {
    "metrics": _metric_row,
    "samples": _sample,
    "evaluations": _evaluation,
    "events": _event,
}


def _rest(row: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in known}


def _integer(row: Mapping[str, Any], name: str, place: str, *, lowest: int = 0) -> int:
    value = row.get(name)
    if type(value) is not int or not lowest <= value <= _MOST:
        raise BadRow(place, f"{name} must be an integer from {lowest} to {_MOST}")
    return value


def _number(value: Any, place: str) -> float:
    try:
        return decode_number(value)
    except (ValueError, OverflowError):
        raise BadRow(place, f"{str(value)[:40]!r} is not a number; send NaN and infinities as strings") from None


def _time(row: Mapping[str, Any], place: str) -> float:
    value = _number(row.get("time"), f"{place}.time")
    if not math.isfinite(value):
        raise BadRow(place, "time must be seconds since 1970")
    return value


def _text(row: Mapping[str, Any], name: str, place: str, longest: int = LONGEST_TEXT) -> str:
    value = row.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise BadRow(place, f"{name} must be text of at most {longest} characters")
    return value


def _check_texts(value: Any, place: str) -> None:
    if isinstance(value, str):
        if _ODD_CHARACTER.search(value):
            raise BadRow(place, "a text contains NUL or a lone surrogate, which cannot be stored")
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if isinstance(key, str):
                _check_texts(key, place)
            inner = f"{key}" if place == "body" else (f"{place}[{key}]" if isinstance(key, int) else place)
            _check_texts(item, inner)
