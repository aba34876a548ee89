"""Parsing of a trainer's batches: accepted as a whole, or rejected with the place of the invalid row. Pure.

A null row stands for an omitted line; it counts as a line and has no content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from gxpo_services.api import fields
from gxpo_services.api.errors import Invalid, TooLarge, describe_error
from gxpo_services.runs.lifecycle import Outcome
from gxpo_trainer.jsonl import decode_number

Kind = Literal["metrics", "samples", "evaluations", "events"]
KINDS: tuple[Kind, ...] = ("metrics", "samples", "evaluations", "events")
MOST_ROWS = 10_000
KINDS_OF_SERVICE = ("state", "recovery")
"""Kinds of events that a trainer may not report: alerts depend on them, and a trainer may run a submitter's code."""
_ODD_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
"""Of characters that a database cannot store: NUL and lone surrogates."""


def _decoded(value: Any) -> float:
    try:
        return decode_number(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{str(value)[:40]!r} is not a number; send NaN and infinities as strings") from None


def _event_kind(kind: str) -> str:
    if kind in KINDS_OF_SERVICE:
        raise ValueError(f"kind {kind} is for events of the service; choose another")
    return kind


_Whole = Annotated[int, Field(strict=True, ge=0, le=fields.MAX_STEP)]
_Launch = Annotated[int, Field(strict=True, ge=1, le=fields.MAX_STEP)]
_Text = Annotated[str, Field(max_length=1_000_000)]
_MetricName = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[float, BeforeValidator(_decoded)]
_Finite = Annotated[FiniteFloat, BeforeValidator(_decoded)]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line of metrics.jsonl; NaN and the infinities are floats again.

    It has as many values as fit in a request: an evaluation has 3·samples_per_prompt + 6 for each benchmark.
    """

    attempt: _Launch
    step: _Whole
    values: Annotated[dict[_MetricName, _Number], Field(validation_alias="metrics")]


class _Turn(BaseModel):
    speaker: Literal["policy", "environment"]
    text: _Text
    reward: _Finite | None = None


class _Sample(BaseModel):
    model_config = ConfigDict(extra="allow")

    attempt: _Launch
    step: _Whole
    time: _Finite
    group_index: _Whole = Field(validation_alias="group")
    sample_index: _Whole = Field(validation_alias="sample")
    prompt_id: str = Field(max_length=300)
    prompt: _Text
    response: _Text
    extracted: _Text | None = None
    gold: _Text
    verdict: str = Field(max_length=20)
    reward: Annotated[_Number | None, AfterValidator(lambda value: None if value != value else value)] = None
    length: _Whole
    truncated: bool = Field(strict=True)
    # Of an episode in an environment.
    turns: list[_Turn] | None = Field(None, max_length=10_000)
    end: str | None = Field(None, max_length=20)
    end_detail: _Text | None = None
    sampled_length: _Whole | None = None

    @model_validator(mode="after")
    def _check_episode(self) -> Self:
        if self.turns is None:
            self.end = self.end_detail = self.sampled_length = None
        elif self.end is None or self.sampled_length is None:
            raise ValueError("turns need end and sampled_length")
        self.end_detail = self.end_detail or None
        return self


class _Evaluation(BaseModel):
    attempt: _Launch
    step: _Whole
    benchmark: str = Field(max_length=200)
    scores: dict[str, _Number]


class _Event(BaseModel):
    model_config = ConfigDict(extra="allow")

    time: _Finite
    kind: Annotated[str, Field(max_length=60), AfterValidator(_event_kind)]
    message: str = Field(max_length=20_000)


_ROWS: dict[Kind, TypeAdapter[Any]] = {
    "metrics": TypeAdapter(MetricRow),
    "samples": TypeAdapter(_Sample),
    "evaluations": TypeAdapter(_Evaluation),
    "events": TypeAdapter(_Event),
}


class Offsets(BaseModel):
    """Whole lines of each file."""

    metrics: _Whole = Field(0, examples=[120])
    samples: _Whole = Field(0, examples=[960])
    evaluations: _Whole = Field(0, examples=[3])
    events: _Whole = Field(0, examples=[7])


_Rows = Annotated[list[dict[str, Any] | None], Field(max_length=MOST_ROWS)]


class IngestRequest(BaseModel):
    """A trainer's report: rows of its files, or a heartbeat."""

    model_config = ConfigDict(extra="allow")

    attempt: _Launch = Field(description="Number of the launch.", examples=[1])
    batch: _Launch | None = Field(None, description="1, 2, 3, … in this launch; null for a heartbeat.", examples=[4])
    phase: str | None = Field(None, max_length=200, description="Its activity.", examples=["waiting for 3 GPUs"])
    offsets: Offsets = Field(default_factory=Offsets, description="Lines of each file before this batch's rows.")
    metrics: _Rows = Field([], description="Lines of metrics.jsonl; null: a line left out.")
    samples: _Rows = Field([], description="Lines of samples.jsonl.")
    evaluations: _Rows = Field([], description="Lines of evaluations.jsonl.")
    events: _Rows = Field([], description="Lines of events.jsonl.")
    identity: dict[str, Any] | None = Field(None, description="run.json, once a launch and when it changed.")
    outcome: dict[str, Any] | None = Field(None, description="outcome.json, with the last batch of a launch.")


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the files by kind, with the numbers of lines before them.

    launch: of the sender. number: of the batch in this launch; None when only the offsets deduplicate it. phase: what
    the sender is doing; None when it does not say. Rows of samples, evaluations and events are columns of their tables.
    """

    launch: int
    number: int | None = None
    phase: str | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[Kind, Sequence[Any]] = field(default_factory=dict)
    identity: dict[str, Any] | None = None
    outcome: Outcome | None = None


def parse(body: bytes) -> Batch:
    """The batch in a request's body. Raises Invalid, which names the row, and TooLarge."""
    content = read_json(body, "body")
    try:
        request = IngestRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "too_long" and first["loc"][0] in KINDS:
            raise TooLarge(f"{first['loc'][0]} has too many rows; send at most {MOST_ROWS} at a time") from None
        raise _invalid(error) from None
    rows = {kind: getattr(request, kind) for kind in KINDS}
    if request.batch is None and (any(rows.values()) or request.identity is not None or request.outcome is not None):
        raise Invalid.of("batch", "must be a number from 1 unless the call is a heartbeat")
    for kind in KINDS:
        if rows[kind] and kind not in request.offsets.model_fields_set:
            raise Invalid.of(f"offsets.{kind}", "must say how many lines come before these rows")
        rows[kind] = [
            None if row is None else parse_row(kind, row, f"{kind}[{number}]") for number, row in enumerate(rows[kind])
        ]
    return Batch(
        launch=request.attempt,
        number=request.batch,
        phase=request.phase,
        offsets=request.offsets.model_dump(),
        rows=rows,
        identity=request.identity,
        outcome=parse_outcome(request.outcome),
    )


def read_json(data: bytes, place: str) -> Any:
    """Strict JSON, with U+FFFD for each character that a database cannot store. Raises Invalid."""
    try:
        content = fields.read_json(data)
    except ValueError as error:
        raise Invalid.of(place, f"is not valid JSON ({error})") from None
    return _storable(content) if _ODD_ESCAPE.search(data) else content


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return fields.ODD_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_storable(name): _storable(item) for name, item in value.items()}
    return [_storable(item) for item in value] if isinstance(value, list) else value


def parse_row(kind: Kind, row: Any, place: str) -> Any:
    """The parsed form of one line. Raises Invalid."""
    try:
        parsed = _ROWS[kind].validate_python(row)
    except ValidationError as error:
        raise _invalid(error, place) from None
    if isinstance(parsed, MetricRow):
        return parsed
    if isinstance(parsed, _Evaluation):
        return parsed.model_dump(exclude={"scores"}) | {"record": row}
    extra = parsed.model_extra or {}
    columns = parsed.model_dump(exclude=set(extra))
    return columns | {"extra" if kind == "samples" else "fields": extra}


def parse_outcome(value: Any) -> Outcome | None:
    """Content of outcome.json. Raises Invalid."""
    try:
        return None if value is None else Outcome.model_validate(value)
    except ValidationError as error:
        raise _invalid(error, "outcome") from None


def _invalid(error: ValidationError, place: str = "") -> Invalid:
    """The first error of a row at `place`, or of a batch."""
    first = error.errors(include_url=False, include_input=False)[0]
    for part in first["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif place.endswith((".metrics", ".scores")):  # a name that the trainer chose
            place += f"[{part[:40]!r}]"
        elif part != "[key]":
            place += f"{'.' if place else ''}{part}"
    return Invalid.of(place or "body", describe_error(first))
