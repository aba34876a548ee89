"""`/runs/{run_id}/samples` and `/runs/{run_id}/evaluations`: responses and scores, of the effective history.

A later attempt replaces the steps from its first one on."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema
from sqlalchemy import ColumnElement, delete, exists, func, insert, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import ReadSession, Viewer, run_number, run_router
from gxpo_services.api.fields import MAX_STEP, JsonNumber, Page, RunId, Text, decode_cursor, encode_cursor
from gxpo_services.api.idempotency import plain_answer
from gxpo_services.db.tables import Attempt, EvaluationRow, Sample

Missing = SkipJsonSchema[None]
"""A member that may be missing, and is never null."""


class TurnView(BaseModel):
    """One turn of an episode. The text is not trusted: never render it as markup."""

    speaker: str = Field(description="`policy` or `environment`.")
    text: str
    reward: float | None = Field(description="What the environment gave for the turn before; null without one.")


class SampleView(BaseModel):
    """A training sample with its verdict. Its texts are model output: never render them as markup."""

    number: int = Field(description="Sequence number in order of arrival.")
    attempt: int
    step: int
    time: float
    group: int = Field(validation_alias="group_index", description="Index of the prompt in the step, from 0.")
    sample: int = Field(validation_alias="sample_index", description="Index of the response, from 0.")
    prompt_id: str
    prompt: str
    response: str
    extracted: str | None = Field(description="The answer extracted from the response; null without one.")
    gold: str
    verdict: str = Field(examples=["correct"])
    reward: JsonNumber | None
    length: int = Field(description="Tokens of the response.")
    truncated: bool
    turns: list[TurnView] | None = Field(description="The episode; null without an environment.")
    end: str | None = Field(description="`done`, `max_turns`, `length`, `timeout` or `error`; null without an episode.")
    end_detail: str | None = Field(description="How the environment failed.")
    sampled_length: int | None = Field(description="Tokens that the policy wrote; null without an environment.")
    extra: dict[str, Any] = Field(description="Other members of the trainer's line, e.g. rendered_prompt, detail.")


class SampleGroupView(BaseModel):
    """All responses to a prompt in a step, also those that are not on the page."""

    step: int
    attempt: int
    group: int = Field(description="Index of the prompt in the step, from 0.")
    prompt_id: str
    responses: int
    correct: int = Field(description="Responses with the verdict `correct`.")
    reward: JsonNumber | None = Field(description="Mean reward of its responses; null without rewards.")


class SamplePage(Page[SampleView]):
    """Samples in order of arrival."""

    groups: list[SampleGroupView] = Field(description="The groups of these samples, with all their responses.")
    steps: list[int] = Field(description="All steps of the run that have samples.")


class EvaluationView(BaseModel):
    """One benchmark at one step, as its line of evaluations.jsonl has it.

    Members without `*` are missing where the trainer did not write them; further ones are returned as they are.
    """

    model_config = ConfigDict(extra="allow")

    attempt: int
    step: int
    benchmark: str
    scores: dict[str, JsonNumber] = Field(description="Scores by name, e.g. `pass@1`, `pass@1/ci_low`, `maj@4`.")
    time: JsonNumber | Missing = None
    per_problem: list[JsonNumber] | Missing = Field(None, description="pass@1 of each; not with `per_problem=false`.")
    problem_ids: list[str] | Missing = Field(None, description="In the order of `per_problem`.")
    num_problems: int | Missing = None
    samples_per_prompt: int | Missing = None
    weights_version: int | Missing = Field(None, description="Step whose weights were evaluated.")
    data_sha256: str | Missing = Field(None, description="Of the evaluated problems, golds and options.")
    files_sha256: dict[str, str] | Missing = Field(None, description="Of the source files, by name.")
    template: str | Missing = Field(None, description="Of the prompts.")
    sampling: dict[str, Any] | Missing = Field(None, description="`temperature`, `max_new_tokens` and `seeded`.")
    environment: dict[str, Any] | Missing = Field(None, description="What answered the policy; missing without one.")
    versions: dict[str, str] | Missing = Field(None, description="Of what a verdict depends on.")
    backward_passes_total: JsonNumber | Missing = Field(None, description="Cost of the run up to the evaluation.")
    training_s: JsonNumber | Missing = None
    tokens_total: JsonNumber | Missing = None


class EvaluationsView(BaseModel):
    """Evaluations in order of steps and benchmarks, one of each."""

    items: list[EvaluationView]


def add_rows(
    session: Session, table: type[Sample | EvaluationRow], run_number: int, rows: Sequence[dict[str, Any]]
) -> None:
    if rows:
        session.execute(insert(table.__table__), [{"run_number": run_number, **row} for row in rows])  # type: ignore[arg-type]


def delete_some(session: Session, run_number: int, most: int) -> bool:
    """Delete samples of a run, at most `most`; whether there were any."""
    some = select(Sample.number).where(Sample.run_number == run_number).limit(most)
    gone = delete(Sample).where(Sample.number.in_(some)).execution_options(synchronize_session=False)
    return bool(session.execute(gone).rowcount)  # type: ignore[attr-defined]


def arrived_samples(session: Session, run_number: int, *, after: int, limit: int) -> list[Sample]:
    """Samples in order of arrival, after the number `after`."""
    query = select(Sample).where(Sample.run_number == run_number, Sample.number > after, _not_replaced(Sample))
    return list(session.scalars(query.order_by(Sample.number).limit(limit)))


def group_counts(session: Session, rows: Sequence[Sample]) -> list[SampleGroupView]:
    """Responses of the groups that these samples of a run belong to, in order of their first sample."""
    if not rows:
        return []
    keys = dict.fromkeys((row.step, row.attempt, row.group_index, row.prompt_id) for row in rows)
    alike = (Sample.step, Sample.attempt, Sample.group_index, Sample.prompt_id, Sample.verdict, Sample.reward)
    query = select(*alike, func.count()).where(
        Sample.run_number == rows[0].run_number,
        Sample.step.in_({row.step for row in rows}),
        Sample.group_index.in_({row.group_index for row in rows}),
    )
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in session.execute(query.group_by(*alike)):
        groups.setdefault(tuple(row[:4]), []).append(row[4:])
    # Without those deleted meanwhile.
    return [_group_view(key, groups[key]) for key in keys if key in groups]


def _group_view(key: tuple[Any, ...], alike: Sequence[tuple[str, float | None, int]]) -> SampleGroupView:
    """alike: verdict, reward and number of the responses that have both in common."""
    step, attempt, group, prompt_id = key
    # Not the database's average: PostgreSQL's is an error where the square of a reward exceeds all floats.
    rewards = [reward for _, reward, number in alike for _ in range(number) if reward is not None]
    return SampleGroupView(
        step=step,
        attempt=attempt,
        group=group,
        prompt_id=prompt_id,
        responses=sum(number for *_, number in alike),
        correct=sum(number for verdict, _, number in alike if verdict == "correct"),
        reward=statistics.mean(rewards) if rewards else None,
    )


def sample_steps(session: Session, run_number: int) -> list[int]:
    """Steps that have samples."""
    # The index yields few pairs of step and attempt, which are then filtered.
    pairs = select(Sample.run_number, Sample.step, Sample.attempt).where(Sample.run_number == run_number).distinct()
    pair = pairs.subquery().c
    return sorted(session.scalars(select(pair.step).where(_not_replaced(pair)).distinct()))


def evaluations_of(
    session: Session, run_numbers: Collection[int], *, benchmark: str | None = None, after: int | None = None
) -> dict[int, list[dict[str, Any]]]:
    """Records by run, in order of steps and benchmarks, one each: the last one of the latest attempt."""
    rows = EvaluationRow.__table__.c
    query = select(rows.run_number, rows.step, rows.benchmark, rows.record, rows.attempt, rows.number)
    query = query.where(rows.run_number.in_(run_numbers), _not_replaced(rows))
    if benchmark is not None:
        query = query.where(rows.benchmark == benchmark)
    if after is not None:
        query = query.where(rows.step > after)
    chosen: dict[int, dict[tuple[int, str], dict[str, Any]]] = {number: {} for number in run_numbers}
    # Sorted here: a database would move the records with their thousands of scores.
    for row in sorted(session.execute(query), key=lambda row: (row.attempt, row.number)):
        chosen[row.run_number][row.step, row.benchmark] = row.record
    return {number: [records[key] for key in sorted(records)] for number, records in chosen.items()}


def _not_replaced(row: Any) -> ColumnElement[bool]:
    """No later attempt reported on this row's step or an earlier one. row: a table's class or columns."""
    return ~exists().where(
        Attempt.run_number == row.run_number, Attempt.attempt > row.attempt, Attempt.first_step <= row.step
    )


router = run_router()

_ORDER = "-samples"
_Text20 = Annotated[Text, StringConstraints(max_length=20)]
_Text300 = Annotated[Text, StringConstraints(max_length=300)]
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Only this step.")]


@router.get("/samples", summary="Samples with verdicts")
def samples(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    step: Step = None,
    verdict: Annotated[_Text20 | None, Query(description="Filter by verdict, e.g. `wrong`.")] = None,
    group: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Only this prompt of each step.")] = None,
    sample: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Only this response of each prompt.")] = None,
    prompt_id: Annotated[_Text300 | None, Query(description="Only this prompt, at any step.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[Text | None, Query(max_length=2000)] = None,
) -> SamplePage:
    """Training samples of the effective history, newest step first, paged."""
    number = run_number(session, run_id)
    wanted = {"step": step, "verdict": verdict, "group_index": group, "sample_index": sample, "prompt_id": prompt_id}
    query = select(Sample).where(Sample.run_number == number, _not_replaced(Sample))
    query = query.filter_by(**{name: value for name, value in wanted.items() if value is not None})
    if cursor is not None:
        last_step, last_number = decode_cursor(cursor, _ORDER, "int32")
        last_step = last_step or 0  # null is in no cursor of ours
        query = query.where(Sample.step <= last_step, or_(Sample.step < last_step, Sample.number > last_number))
    rows = session.scalars(query.order_by(Sample.step.desc(), Sample.number).limit(limit + 1)).all()
    last = rows[limit - 1] if len(rows) > limit else None
    return SamplePage(
        items=[SampleView.model_validate(row, from_attributes=True) for row in rows[:limit]],
        groups=group_counts(session, rows[:limit]),
        next_cursor=None if last is None else encode_cursor(_ORDER, last.step, last.number),
        steps=sample_steps(session, number),
    )


@router.get("/evaluations", summary="Evaluations", response_model=EvaluationsView)
def evaluations(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    benchmark: Annotated[Annotated[Text, StringConstraints(max_length=200)] | None, Query()] = None,
    after: Annotated[int | None, Query(ge=-1, le=MAX_STEP, description="Only later steps.")] = None,
    per_problem: Annotated[bool, Query(description="Include the scores of each problem.")] = True,
) -> Response:
    """Evaluations of the effective history, one record per step and benchmark."""
    number = run_number(session, run_id)
    records = evaluations_of(session, [number], benchmark=benchmark, after=after)[number]
    if not per_problem:
        records = [{name: value for name, value in record.items() if name != "per_problem"} for record in records]
    return plain_answer({"items": records})
