"""Every change of a run's state goes through `move`: checked, fenced, timed and recorded in one transaction."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import update
from sqlalchemy.orm import Session

from gxpo_services.db.tables import Run
from gxpo_services.outputs import events
from gxpo_services.run_states import TERMINAL, RunState, check_transition
from gxpo_trainer.errors import REASONS


class StateChanged(Exception):
    """The run's state or lease changed concurrently; read it again."""


class Outcome(BaseModel):
    """Outcome of a launch as reported by the trainer (outcome.json)."""

    model_config = ConfigDict(extra="ignore")

    attempt: int = Field(ge=1, description="The launch that it refers to.")
    outcome: Literal["succeeded", "failed", "paused", "cancelled"]
    ended_by: str | None = Field(None, max_length=20, description="The budget limit that was reached.")
    reason: str | None = Field(None, max_length=40, description="Why it failed.")
    message: str = Field("", max_length=20_000)
    recoverable: bool = Field(False, description="A failed run should be launched again.")


def move(
    session: Session,
    run: Run,
    new: RunState,
    *,
    actor: str,
    message: str,
    lease_token: int | None = None,
    **values: Any,
) -> None:
    """Change a run's state and other columns, record the event, and refresh `run`.

    lease_token: that of the calling scheduler. Raises IllegalTransition when `new` may not follow; StateChanged after a
    concurrent change of the state, or when the lease is another one.
    """
    old = RunState(run.state)
    check_transition(old, new)
    now = time.time()
    values |= {"state": new, "updated_at": now}
    if new is RunState.QUEUED:
        values["queued_at"] = now
    if new is RunState.RUNNING and run.started_at is None:
        values["started_at"] = now
    if new in (RunState.PAUSING, RunState.CANCELLING):
        values["request_at"] = now
    if new in TERMINAL or new in (RunState.PAUSED, RunState.QUEUED):
        values |= {"lease_owner": None, "lease_expires_at": None, "run_token_sha256": None, "phase": None}
    if new in TERMINAL:
        values["ended_at"] = now
    change(session, run, lease_token, **values)
    events.record(session, run.number, actor, "state", message, old=old, new=new, reason=values.get("reason"))


def change(session: Session, run: Run, held_token: int | None, /, **values: Any) -> None:
    """Change columns, and the caller's object. held_token: the lease under which the run must be, if any.

    Raises StateChanged when the run was taken over or has changed its state.
    """
    query = update(Run).where(Run.number == run.number, Run.state == run.state)
    if held_token is not None:
        query = query.where(Run.lease_token == held_token)
    changed = session.execute(query.values(**values).execution_options(synchronize_session=False))
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        raise StateChanged(f"run {run.id} was taken over or changed its state")
    session.refresh(run)


def apply_outcome(session: Session, run: Run, outcome: Outcome, *, actor: str, lease_token: int | None = None) -> bool:
    """Move a run to the state that follows its outcome; False when the outcome does not apply.

    An outcome of an earlier launch is ignored; a recoverable failure is left to the scheduler. If a run finishes before
    a pause or cancel request takes effect, its outcome wins. One that pauses after a cancel request is cancelled.
    """
    state = RunState(run.state)
    if outcome.recoverable or outcome.attempt != run.launch or state in (*TERMINAL, RunState.QUEUED, RunState.PAUSED):
        return False
    if state in (RunState.STARTING, RunState.RECOVERING) and outcome.outcome != "failed":
        # It ran: heartbeat and outcome arrived together.
        move(session, run, RunState.RUNNING, actor=actor, message="the trainer reported", lease_token=lease_token)
        state = RunState.RUNNING
    values: dict[str, Any] = {}
    if outcome.outcome == "succeeded":
        reason = "steps_done" if outcome.ended_by == "steps" else "budget_reached"
        values = {"reason": reason, "ended_by": outcome.ended_by, "detail": ""}
        new, message = RunState.SUCCEEDED, f"budget.{outcome.ended_by} reached"
    elif outcome.outcome == "failed":
        reason = outcome.reason if outcome.reason in REASONS else "training_error"
        values = {"reason": reason, "detail": outcome.message}
        new, message = RunState.FAILED, f"{reason}: {outcome.message}"
    elif state is RunState.CANCELLING:
        new, message = RunState.CANCELLED, "the trainer stopped at the end of a step"
    elif state is RunState.PAUSING and outcome.outcome == "paused":
        new, message = RunState.PAUSED, "the trainer wrote a checkpoint and exited"
    else:
        return False
    move(session, run, new, actor=actor, message=message, lease_token=lease_token, **values)
    return True
