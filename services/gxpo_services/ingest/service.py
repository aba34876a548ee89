"""Authentication and application of trainers' batches."""

from __future__ import annotations

from sqlalchemy.orm import Session

from gxpo_services.access.principals import same_hash
from gxpo_services.api.errors import Conflict, Gone, Invalid, TooLarge, Unauthorized
from gxpo_services.events.repository import TRAINER
from gxpo_services.ingest import apply
from gxpo_services.ingest.batches import BadRow, Batch, TooManyRows, parse
from gxpo_services.runs import repository

ACTOR = TRAINER
_TAKES_NONE = "the run accepts no reports: it has ended, waits for its next launch, or was deleted"
"""One message for all cases: without the run's token nothing is revealed about it."""


def check_token(session: Session, run_id: str, token: str) -> None:
    """Check that a token belongs to the run's current launch. Raises Gone, Unauthorized."""
    _check_owner(repository.token_hash(session, run_id), token)


def read_batch(body: bytes) -> Batch:
    """The batch in a body. Raises Invalid naming the row, TooLarge."""
    try:
        return parse(body)
    except BadRow as error:
        raise Invalid.of(error.place, error.message) from None
    except TooManyRows as error:
        raise TooLarge(str(error)) from None


def receive(session: Session, run_id: str, token: str, batch: Batch) -> apply.IngestAnswer:
    """Apply a trainer's report. Raises Gone, Unauthorized; Conflict when lines are missing before it."""
    run = repository.lock(session, run_id)
    if run is None:
        raise Gone(_TAKES_NONE)
    # Checked again under the lock: another launch may own the run by now.
    _check_owner(run.run_token_sha256, token)
    if batch.launch != run.launch:
        raise Unauthorized(f"launch {run.launch} owns the run now; launch {batch.launch} may not report any more")
    apply.record_heartbeat(session, run, ACTOR, batch.phase)
    try:
        answer = apply.apply_batch(session, run, batch, ACTOR)
    except apply.LinesMissing as error:
        raise Conflict("lines are missing before this batch; continue from `offsets`", offsets=error.offsets) from None
    if batch.number is None:
        return apply.IngestAnswer(False, answer.offsets, answer.request)
    return answer


def _check_owner(stored: str | None, token: str) -> None:
    if same_hash(token, stored):
        return
    if stored is None:
        raise Gone(_TAKES_NONE)
    raise Unauthorized("the token does not belong to the run's current launch; another launch owns the run")
