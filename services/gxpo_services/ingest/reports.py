"""`/runs/{run_id}/ingest`: where trainers report, and how a report is applied to the database.

    attempts                         first step of each attempt
    metric_blocks, metric_last       values; last and extreme values of the effective history
    samples, evaluations, events     appended
    runs                             line offsets, progress, score, identity, and the state that follows the outcome

A batch may arrive twice, overlap earlier ones, or arrive while the scheduler reads the same lines from disk. Its number
and the line offsets ensure that each line is applied once. The run's row is locked, so batches of a run are serialized.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute
from gxpo_services.api.errors import Conflict, Gone, Problem, Unauthorized, Unavailable, responses
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
    numbers, present = metrics.summaries(session, run.number)
    new = list(dict.fromkeys(name for row in rows for name in row.values if name not in numbers))
    if new:
        left_out = _beyond_limit(session, run.number, new)
        rows = [replace(row, values={n: v for n, v in row.values.items() if n not in left_out}) for row in rows]
        # Only names that the run has no values of could be deleted meanwhile.
        numbers |= metrics.numbers_of(session, {*new} - left_out)
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


def _beyond_limit(session: Session, run_number: int, names: Sequence[str]) -> set[str]:
    """Metrics that the run has no room for, none of those that are counted; the first time is an event.

    names: of which the run has no values, except of replaced steps.
    """
    had = set(session.scalars(select(MetricBlock.name_number).where(MetricBlock.run_number == run_number).distinct()))
    if len(had) + len(names) <= metrics.MOST_OF_RUN:
        return set()
    known = metrics.find_numbers(session, names)
    new = [name for name in names if known.get(name) not in had and name not in _COUNTED]
    left_out = new[max(0, metrics.MOST_OF_RUN - len(had)) :]
    of_kind = select(Event.number).where(Event.run_number == run_number, Event.kind == METRICS_LEFT_OUT)
    if left_out and session.scalar(of_kind.limit(1)) is None:
        fix = "report fewer names, or lower evaluation.samples_per_prompt"
        limit = f"a run has at most {metrics.MOST_OF_RUN} metrics; {fix}"
        message = f"metric {left_out[0]!r} and {len(left_out) - 1} more are left out: {limit}"
        events.record(session, run_number, TRAINER, METRICS_LEFT_OUT, message)
    return set(left_out)


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


def receive(database: Database, run_id: str, token: str, body: bytes) -> IngestView:
    """Apply a trainer's report.

    Raises Invalid naming the row, TooLarge, Gone, Unauthorized; Conflict when lines are missing before it.
    """
    try:
        batch = parse(body)
    except Problem:
        _check_token(database, run_id, token)
        raise
    with database.writing() as session:
        if (run := service.lock(session, run_id, token)) is not None:
            if batch.launch != run.launch:
                owner = f"launch {run.launch} owns the run now"
                raise Unauthorized(f"{owner}; launch {batch.launch} may not report any more")
            record_heartbeat(session, run, batch.phase)
            return _view(run, applied=apply_batch(session, run, batch, TRAINER))
    _check_token(database, run_id, token)
    raise Unavailable("the run was changed meanwhile; repeat the report")


def _view(run: Any, *, applied: bool) -> IngestView:
    request = pending_request(RunState(run.state))
    return IngestView(applied=applied, offsets=Offsets(**run.offsets), request=request)


@dataclass(slots=True, eq=False)
class _Heartbeat:
    """view: the answer, None while there is none, and if the report must be applied by itself."""

    run_id: str
    token: str
    body: bytes
    any_report: bool
    is_done: bool = False
    view: IngestView | None = None


class Heartbeats:
    """Heartbeats that say nothing new, most of what a service receives. Those that arrive while others are recorded are
    recorded together, in one statement: a statement for each costs as much as for many, and threads that wait for the
    database take the GIL from each other."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turn = anyio.Lock()
        self._waiting: list[_Heartbeat] = []

    async def record(self, run_id: str, token: str, body: bytes, *, any_report: bool = False) -> IngestView | None:
        """The answer. None if this is no heartbeat, says something new, or is not of the run's launch: it is for
        `receive`. any_report: one with rows counts as a heartbeat."""
        own = _Heartbeat(run_id, token, body, any_report)
        self._waiting.append(own)
        async with self._turn:
            if not own.is_done:
                together, self._waiting = self._waiting, []
                try:
                    await run_in_threadpool(_record_together, self._database, together)
                finally:
                    for one in together:
                        one.is_done = True
        return own.view


def _record_together(database: Database, heartbeats: Sequence[_Heartbeat]) -> None:
    """Record what can be recorded together, and fill in its answers."""
    by_run: dict[str, _Heartbeat] = {}
    given = []
    now = time.time()
    for one in heartbeats:
        with suppress(Problem):  # `receive` names it
            batch = parse(one.body)
            if (batch.number is None or one.any_report) and one.run_id not in by_run:
                by_run[one.run_id] = one
                # The end of a silence is news, which only `receive` passes on; of a refused report it must count too.
                since = 0.0 if one.any_report else now - SILENCE_S
                whose = {"run": one.run_id, "token": hash_token(one.token), "launch": batch.launch}
                given.append(whose | {"phase": batch.phase, "since": since})
    if given:
        values = {"given": json.dumps(given), "now": now}
        with database.single_write() as connection:
            for run in connection.execute(_heartbeats(sqlite=database.is_sqlite), values):
                by_run[run.id].view = _view(run, applied=False)


@functools.cache
def _heartbeats(*, sqlite: bool) -> Any:
    """Record heartbeats of runs whose state and phase stay. Rows that are locked are left out: nothing waits for the
    heartbeat of another run."""

    def member(name: str) -> str:
        return f"json_extract(given.value, '$.{name}')" if sqlite else f"(given.value ->> '{name}')"

    rows = "json_each(:given) AS given" if sqlite else "jsonb_array_elements(CAST(:given AS JSONB)) AS given(value)"
    statement = f"""
        UPDATE runs SET heartbeat_at = :now WHERE number IN (
            SELECT runs.number FROM {rows} JOIN runs ON runs.id = {member("run")}
            WHERE runs.run_token_sha256 = {member("token")}
            AND runs.launch = CAST({member("launch")} AS INTEGER)
            AND ({member("phase")} IS NULL OR runs.phase = {member("phase")})
            AND runs.state NOT IN ('{RunState.STARTING}', '{RunState.RECOVERING}')
            AND runs.heartbeat_at > CAST({member("since")} AS DOUBLE PRECISION)
            {"" if sqlite else "FOR UPDATE OF runs SKIP LOCKED"}
        ) RETURNING id, offsets, state
    """
    return text(statement).columns(Run.id, Run.offsets, Run.state)


def _check_token(database: Database, run_id: str, token: str) -> None:
    """Check the token of the run's current launch. Raises Gone, Unauthorized."""
    with database.autocommit_connection() as connection:
        _check_owner(connection.scalar(select(Run.run_token_sha256).where(Run.id == run_id)), token)


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
_LARGEST_HEARTBEAT = 2_048
_WAIT_S = 8.0
"""Trainers send a report again after 10 s without an answer. A service that applied what nobody waits for any longer
would have no time for the rest."""


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
    # The token is checked before a large body is read, and before an error in any is named. Each switch of threads
    # costs as much as a query, so everything about a small one happens in one thread.
    request.state.is_routine = True  # a line of the log for each heartbeat would be most of it
    if int(request.headers.get("content-length") or _SMALL_BODY + 1) > _SMALL_BODY:
        await run_in_threadpool(_check_token, database, run_id, token)
    try:
        body = await request.body()
    except ClientDisconnect:
        body = b""  # the client is gone
    heartbeats: Heartbeats = request.app.state.heartbeats
    if len(body) <= _LARGEST_HEARTBEAT and (view := await heartbeats.record(run_id, token, body)) is not None:
        return answer(view)
    gate: anyio.Semaphore = request.app.state.report_gate
    with anyio.move_on_after(_WAIT_S) as waiting:
        await gate.acquire()
    if waiting.cancelled_caught:
        counts = await heartbeats.record(run_id, token, body, any_report=True) is not None
        detail = "too many reports wait for the database; send this one again later"
        raise Unavailable(f"{detail} (it counts as a heartbeat)" if counts else detail)
    try:
        return answer(await run_in_threadpool(receive, database, run_id, token, body))
    finally:
        gate.release()
