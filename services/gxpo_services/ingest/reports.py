"""`/runs/{run_id}/ingest`: where trainers report, and how a report is applied to the database.

    attempts                         first step of each attempt
    metric_blocks, metric_last       values; last and extreme values of the effective history
    samples, evaluations, events     appended
    runs                             line offsets, progress, score, identity, and the state that follows the outcome

A batch may arrive twice, overlap earlier ones, or arrive while the scheduler reads the same lines from disk. Its number
and the line offsets ensure that each line is applied once. The run's row is locked, so batches of a run are serialized.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute
from gxpo_services.api.errors import Conflict, Gone, Unauthorized, responses
from gxpo_services.api.fields import RunId
from gxpo_services.api.idempotency import answer
from gxpo_services.api.principals import hash_token
from gxpo_services.db.database import Database, note_change
from gxpo_services.db.tables import EvaluationRow, Event, MetricBlock, Run, Sample
from gxpo_services.ingest.batches import KINDS, Batch, IngestRequest, MetricRow, Offsets, parse
from gxpo_services.outputs import events, metrics, samples
from gxpo_services.outputs.events import TRAINER
from gxpo_services.outputs.metrics import BACKWARD_PASSES, SCORE, TOKENS, TRAINING_S, Summary, encode
from gxpo_services.run_states import SILENCE_S, RunState, pending_request, silent_s
from gxpo_services.runs import lifecycle, service
from gxpo_trainer.config.base import half_of_limit_passed

METRICS_LEFT_OUT, LAUNCH_FAILED = "metrics_left_out", "launch_failed"
_COUNTED = (BACKWARD_PASSES, TOKENS, TRAINING_S, SCORE)


class IngestView(BaseModel):
    """Result of a report."""

    applied: bool = Field(description="False for a heartbeat and for a repeated batch.")
    offsets: Offsets = Field(description="Lines that the service has now.")
    request: Literal["pause", "cancel"] | None = Field(description="Request to carry out at the end of the step.")


def record_heartbeat(session: Session, run: Run, phase: str | None) -> None:
    """Record a heartbeat; the first one of a launch moves the run to `running`."""
    now = time.time()
    if silent_s(run.state, run.heartbeat_at, now) is not None:
        note_change(session)
    run.heartbeat_at = now
    if phase is not None and phase != run.phase:
        note_change(session)
        if half_of_limit_passed(phase) and not half_of_limit_passed(run.phase):
            events.record(session, run.number, TRAINER, "no_progress", phase)
        run.phase = phase
    if run.state in (RunState.STARTING, RunState.RECOVERING):
        message = f"launch {run.launch} sent its first heartbeat"
        lifecycle.move(session, run, RunState.RUNNING, actor=TRAINER, message=message)


def apply_batch(session: Session, run: Run, batch: Batch, actor: str) -> bool:
    """Apply the new rows of a batch to a run whose row is locked; False for a heartbeat and for a repeated batch.

    Raises Conflict when lines are missing.
    """
    offsets: dict[str, int] = {kind: run.offsets.get(kind, 0) for kind in KINDS}
    if batch.number is not None and batch.number <= run.last_batch:
        return False
    if any(rows and batch.offsets[kind] > offsets[kind] for kind, rows in batch.rows.items()):
        raise Conflict("lines are missing before this batch; continue from `offsets`", offsets=offsets)
    new: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for kind, rows in batch.rows.items():
        fresh = rows[max(0, offsets[kind] - batch.offsets[kind]) :]
        offsets[kind] += len(fresh)
        new[kind] = [row for row in fresh if row is not None]
    if batch.identity is not None or any(new.values()):
        note_change(session)
    if new["metrics"]:
        with session.no_autoflush:  # one UPDATE of the run, at the end
            _apply_metrics(session, run, new["metrics"])
    samples.add_rows(session, Sample, run.number, new["samples"])
    samples.add_rows(session, EvaluationRow, run.number, new["evaluations"])
    events.add_events(session, run.number, new["events"], actor=events.TRAINER)
    if offsets != run.offsets:
        run.offsets = offsets
    if batch.number is not None:
        run.last_batch = batch.number
    if batch.identity is not None:
        run.identity = batch.identity
        run.updated_at = time.time()
    session.flush()
    if (outcome := batch.outcome) is not None:
        lifecycle.apply_outcome(session, run, outcome, actor=actor)
        if outcome.recoverable:  # for the scheduler: on a full disk there is no outcome.json
            message = f"{outcome.reason}: {outcome.message}"
            fields = {"launch": outcome.attempt, "reason": outcome.reason}
            events.record(session, run.number, events.SERVICE, LAUNCH_FAILED, message, **fields)
    return batch.number is not None


def _apply_metrics(session: Session, run: Run, rows: Sequence[MetricRow]) -> None:
    before = metrics.first_steps(session, [run.number])[run.number]
    firsts = dict(before)
    for row in rows:
        firsts[row.attempt] = min(row.step, firsts.get(row.attempt, row.step))
    begun = {attempt: first for attempt, first in firsts.items() if before.get(attempt) != first}
    metrics.put_first_steps(session, run.number, begun)
    present = metrics.summaries(session, run.number)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    numbers = metrics.find_numbers(session, {*_COUNTED, *names})
    left_out = _beyond_limit(session, run.number, names, present, numbers)
    if left_out:
        rows = [replace(row, values={n: v for n, v in row.values.items() if n not in left_out}) for row in rows]
    # Only names that the run has no values of could be deleted meanwhile.
    new = {name for name in names if name not in left_out and numbers.get(name) not in present}
    numbers |= metrics.numbers_of(session, new)
    for attempt in sorted({row.attempt for row in rows}):
        values = [(row.step, row.values) for row in rows if row.attempt == attempt]
        parts = {(numbers[name], block): data for (name, block), data in encode(values).items()}
        if parts:
            metrics.append_blocks(session, run.number, attempt, parts)
    is_replacing = bool(begun) and len(firsts) > 1
    changed = _summarise(session, run.number, rows, numbers, present, firsts, is_replacing=is_replacing)
    metrics.put_summaries(session, run.number, changed)
    newest = max(firsts)
    reached = max((row.step for row in rows if row.attempt == newest), default=0)
    run.attempt = newest
    run.step = max(run.step, reached) if newest in before else reached
    _count(run, {name: (present | changed).get(numbers.get(name, -1)) for name in _COUNTED})


def _beyond_limit(
    session: Session, run_number: int, names: Sequence[str], present: Collection[int], known: Mapping[str, int]
) -> list[str]:
    """Metrics that the run has no room for, none of those that are counted; the first time is an event."""
    if all(known.get(name) in present for name in names):
        return []
    # Those of replaced steps too.
    had = set(session.scalars(select(MetricBlock.name_number).where(MetricBlock.run_number == run_number).distinct()))
    new = [name for name in names if known.get(name) not in had and name not in _COUNTED]
    left_out = new[max(0, metrics.MOST_OF_RUN - len(had)) :]
    of_kind = select(Event.number).where(Event.run_number == run_number, Event.kind == METRICS_LEFT_OUT)
    if left_out and session.scalar(of_kind.limit(1)) is None:
        fix = "report fewer names, or lower evaluation.samples_per_prompt"
        limit = f"a run has at most {metrics.MOST_OF_RUN} metrics; {fix}"
        message = f"metric {left_out[0]!r} and {len(left_out) - 1} more are left out: {limit}"
        events.record(session, run_number, TRAINER, METRICS_LEFT_OUT, message)
    return left_out


def _summarise(
    session: Session,
    run_number: int,
    rows: Sequence[MetricRow],
    numbers: Mapping[str, int],
    present: Mapping[int, Summary],
    firsts: Mapping[int, int],
    *,
    is_replacing: bool,
) -> dict[int, Summary | None]:
    """Changed last and extreme values by metric number; None where no value is left.

    A value of a later step updates the stored summary. Repeated steps, and all metrics when an attempt replaces some of
    the history, are computed from the blocks.
    """
    reported = {numbers[name] for row in rows for name in row.values}
    recomputed = reported.union(present) if is_replacing else set()
    changed: dict[int, Summary | None] = {}
    for row in rows:
        for name, value in row.values.items():
            number = numbers[name]
            summary = changed.get(number) or replace(present.get(number) or Summary(None, -1, None, None))
            changed[number] = summary
            if row.step > summary.last_step:
                summary.add(row.step, value)
            else:
                recomputed.add(number)
    if recomputed:
        histories = metrics.histories(session, recomputed, {run_number: firsts})
        for number in recomputed:
            records = histories.get((run_number, number))
            changed[number] = None if records is None else metrics.summary_of(records)
    return changed


def _count(run: Run, summaries: Mapping[str, Summary | None]) -> None:
    """Update progress and score of the run from the effective history."""

    def last(name: str) -> float | None:
        summary = summaries[name]
        return None if summary is None or summary.last is None or math.isinf(summary.last) else summary.last

    run.backward_passes = last(BACKWARD_PASSES) or 0.0
    run.tokens = last(TOKENS) or 0.0
    run.training_s = last(TRAINING_S) or 0.0
    score = summaries[SCORE]
    run.score = last(SCORE)
    run.score_best = None if score is None else score.highest
    run.score_step = None if score is None else score.last_step


_TAKES_NONE = "the run accepts no reports: it has ended, waits for its next launch, or was deleted"
"""One message for all cases: without the run's token nothing is revealed about it."""


def receive(session: Session, run_id: str, token: str, body: bytes) -> IngestView:
    """Apply a trainer's report.

    Raises Invalid naming the row, TooLarge, Gone, Unauthorized; Conflict when lines are missing before it.
    """
    batch = parse(body)
    applied = False
    run = _repeat_heartbeat(session, run_id, token, batch) if batch.number is None else None
    if run is None:
        run = service.lock(session, run_id)
        if run is None:
            raise Gone(_TAKES_NONE)
        # Checked again under the lock: another launch may own the run by now.
        _check_owner(run.run_token_sha256, token)
        if batch.launch != run.launch:
            raise Unauthorized(f"launch {run.launch} owns the run now; launch {batch.launch} may not report any more")
        record_heartbeat(session, run, batch.phase)
        applied = apply_batch(session, run, batch, TRAINER)
    request = pending_request(RunState(run.state))
    return IngestView(applied=applied, offsets=Offsets(**run.offsets), request=request)


_table = Run.__table__.c
_REPEAT = (
    update(Run.__table__)  # type: ignore[arg-type]
    .where(
        _table.id == bindparam("run"),
        _table.run_token_sha256 == bindparam("token"),
        _table.launch == bindparam("of_launch"),
        _table.state.not_in((RunState.STARTING, RunState.RECOVERING)),
        _table.heartbeat_at > bindparam("since"),
    )
    .values(heartbeat_at=bindparam("now"))
    .returning(_table.offsets, _table.state)
)
_REPEAT_PHASE = _REPEAT.where(_table.phase == bindparam("of_phase"))


def _repeat_heartbeat(session: Session, run_id: str, token: str, batch: Batch) -> Any:
    """Record a heartbeat that says nothing new, in one statement: most of what a service receives.

    The run's offsets and state; None if it says something new.
    """
    now = time.time()
    values = {
        "run": run_id,
        "token": hash_token(token),
        "of_launch": batch.launch,
        "since": now - SILENCE_S,
        "now": now,
    }
    query, phase = (_REPEAT, {}) if batch.phase is None else (_REPEAT_PHASE, {"of_phase": batch.phase})
    return session.connection().execute(query, values | phase).one_or_none()


def _check_owner(token_sha256: str | None, token: str) -> None:
    """Check that a token is that of the run's current launch. Raises Gone, Unauthorized."""
    if token_sha256 is None:
        raise Gone(_TAKES_NONE)
    if not secrets.compare_digest(hash_token(token), token_sha256):
        raise Unauthorized("the token does not belong to the run's current launch; another launch owns the run")


router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))

_INGEST = IngestRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_INGEST.pop("$defs")  # they are components: the answer has them too
_SMALL_BODY = 65_536


def _check_token(database: Database, run_id: str, token: str) -> None:
    """Check the token of the run's current launch. Raises Gone, Unauthorized."""
    with database.autocommit_connection() as connection:
        _check_owner(connection.scalar(select(_table.run_token_sha256).where(_table.id == run_id)), token)


def _receive(database: Database, run_id: str, token: str, body: bytes) -> IngestView:
    _check_token(database, run_id, token)
    with database.writing() as session:
        return receive(session, run_id, token, body)


@router.post(
    "/runs/{run_id}/ingest",
    summary="Report to the service (trainers)",
    response_model=IngestView,
    responses=responses(409, 410),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _INGEST}}}},
)
async def ingest(request: Request, run_id: RunId, token: BearerToken, database: DatabaseDep) -> Response:
    """Rows of a run's files, applied exactly once: a repeated batch number changes nothing, and rows that the service
    already has are skipped. Needs the token of the run's current launch; access tokens are not accepted.

    409 contains `offsets`, the lines that the service has: continue from there. 401: another launch owns the run. 410:
    the run is over or deleted. 422 names the invalid row; nothing of the batch is applied.
    """
    # The token is checked before a large body is read and before the row is locked. Each switch of threads costs as
    # much as a query, so everything about a small one happens in one thread.
    request.state.is_routine = True  # a line of the log for each heartbeat would be most of it
    if int(request.headers.get("content-length") or _SMALL_BODY + 1) > _SMALL_BODY:
        await run_in_threadpool(_check_token, database, run_id, token)
    try:
        body = await request.body()
    except ClientDisconnect:
        body = b""  # the client is gone
    async with request.app.state.report_gate:
        return answer(await run_in_threadpool(_receive, database, run_id, token, body))
