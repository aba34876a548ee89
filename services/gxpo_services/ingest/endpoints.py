"""`/runs/{run_id}/ingest`: where trainers report. Authentication by the run's token, parsing and application."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from gxpo_services.api.dependencies import BearerToken, DatabaseDep, ServiceRoute, WriteSession
from gxpo_services.api.errors import Conflict, Gone, Invalid, TooLarge, Unauthorized, responses
from gxpo_services.api.fields import RunId
from gxpo_services.api.principals import same_hash
from gxpo_services.db.tables import Run
from gxpo_services.ingest import apply
from gxpo_services.ingest.batches import LONGEST_PHASE, MOST_ROWS, BadRow, TooManyRows, parse
from gxpo_services.outputs.events import TRAINER
from gxpo_services.runs import service


class Offsets(BaseModel):
    """Whole lines of each file."""

    metrics: int = Field(0, ge=0, le=2**31 - 1, examples=[120])
    samples: int = Field(0, ge=0, le=2**31 - 1, examples=[960])
    evaluations: int = Field(0, ge=0, le=2**31 - 1, examples=[3])
    events: int = Field(0, ge=0, le=2**31 - 1, examples=[7])


_Rows = Annotated[list[dict[str, Any] | None], Field(max_length=MOST_ROWS)]


class IngestRequest(BaseModel):
    """A trainer's report: rows of its files, or a heartbeat. For documentation; batches.py validates."""

    model_config = ConfigDict(extra="allow")

    attempt: int = Field(ge=1, le=2**31 - 1, description="Number of the launch.", examples=[1])
    batch: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="1, 2, 3, … in this launch; null for a heartbeat without rows.",
        examples=[4],
    )
    phase: str | None = Field(
        None, max_length=LONGEST_PHASE, description="What the trainer is doing.", examples=["waiting for 3 GPUs"]
    )
    offsets: Offsets = Field(default_factory=Offsets, description="Lines of each file before this batch's rows.")
    metrics: _Rows = Field([], description="Lines of metrics.jsonl; null: a line left out.")
    samples: _Rows = Field([], description="Lines of samples.jsonl.")
    evaluations: _Rows = Field([], description="Lines of evaluations.jsonl.")
    events: _Rows = Field([], description="Lines of events.jsonl.")
    identity: dict[str, Any] | None = Field(None, description="run.json, once a launch and when it changed.")
    outcome: dict[str, Any] | None = Field(None, description="outcome.json, with the last batch of a launch.")


class IngestView(BaseModel):
    """Result of a report."""

    applied: bool = Field(description="False for a heartbeat and for a repeated batch.")
    offsets: Offsets = Field(description="Lines that the service has now.")
    request: Literal["pause", "cancel"] | None = Field(
        description="Pause or cancel request, to be carried out at the end of the step."
    )


_TAKES_NONE = "the run accepts no reports: it has ended, waits for its next launch, or was deleted"
"""One message for all cases: without the run's token nothing is revealed about it."""


def receive(session: Session, run_id: str, token: str, body: bytes) -> apply.IngestAnswer:
    """Apply a trainer's report.

    Raises Invalid naming the row, TooLarge, Gone, Unauthorized; Conflict when lines are missing before it.
    """
    try:
        batch = parse(body)
    except BadRow as error:
        raise Invalid.of(error.place, error.message) from None
    except TooManyRows as error:
        raise TooLarge(str(error)) from None
    run = service.lock(session, run_id)
    if run is None:
        raise Gone(_TAKES_NONE)
    # Checked again under the lock: another launch may own the run by now.
    _check_owner(run.run_token_sha256, token)
    if batch.launch != run.launch:
        raise Unauthorized(f"launch {run.launch} owns the run now; launch {batch.launch} may not report any more")
    apply.record_heartbeat(session, run, TRAINER, batch.phase)
    try:
        answer = apply.apply_batch(session, run, batch, TRAINER)
    except apply.LinesMissing as error:
        raise Conflict("lines are missing before this batch; continue from `offsets`", offsets=error.offsets) from None
    if batch.number is None:
        return apply.IngestAnswer(False, answer.offsets, answer.request)
    return answer


def _check_owner(token_sha256: str | None, token: str) -> None:
    """Check that a token is that of the run's current launch. Raises Gone, Unauthorized."""
    if token_sha256 is None:
        raise Gone(_TAKES_NONE)
    if not same_hash(token, token_sha256):
        raise Unauthorized("the token does not belong to the run's current launch; another launch owns the run")


router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))

_INGEST = IngestRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_INGEST.pop("$defs")  # they are components: the answer has them too


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        return b""  # the client is gone


def _run_token(run_id: RunId, token: BearerToken, database: DatabaseDep) -> str:
    """Check the token of the run's current launch, before the body is read and the row is locked."""
    with database.reading() as session:
        _check_owner(session.scalar(select(Run.run_token_sha256).where(Run.id == run_id)), token)
    return token


@router.post(
    "/runs/{run_id}/ingest",
    summary="Report to the service (trainers)",
    response_model=IngestView,
    responses=responses(409, 410, 413),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _INGEST}}}},
)
def ingest(
    run_id: RunId,
    token: Annotated[str, Depends(_run_token)],
    body: Annotated[bytes, Depends(_body)],
    session: WriteSession,
) -> Response:
    """Rows of a run's files, applied exactly once: a repeated batch number changes nothing, and rows that the service
    already has are skipped. Needs the token of the run's current launch; access tokens are not accepted.

    409 contains `offsets`, the lines that the service has: continue from there. 401: another launch owns the run. 410:
    the run is over or deleted. 422 names the invalid row; nothing of the batch is applied.
    """
    answer = receive(session, run_id, token, body)
    return JSONResponse(asdict(answer))
