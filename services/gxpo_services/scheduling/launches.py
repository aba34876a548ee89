"""State changes of a run by the scheduler, each in the caller's transaction and fenced by the lease token."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from gxpo_services.api.principals import hash_token, new_token
from gxpo_services.db.tables import Run
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.runs import lifecycle
from gxpo_services.scheduling import leases


def job_id(run_id: str, launch: int) -> str:
    """Job id of a launch; never reused."""
    return f"{run_id}-{launch}"


def begin(session: Session, run: Run, *, owner: str, actor: str, now: float, until: float) -> str:
    """Move a run from queued to starting under a lease of `owner`; returns the secret of the new launch.

    Raises StateChanged when the run is no longer queued.
    """
    token = run.lease_token
    secret, values = _next_launch(run, now)
    message = f"launch {values['launch']} started"
    # Fenced by the old token, which every claim increments.
    lifecycle.move(session, run, RunState.STARTING, actor=actor, message=message, lease_token=token, **values)
    leases.set_held(session, run, token, lease_owner=owner, lease_token=token + 1, lease_expires_at=until)
    return secret


def relaunch(
    session: Session, run: Run, *, lease_token: int, actor: str, now: float, counted: bool, message: str
) -> str:
    """Relaunch a run from its last checkpoint; returns the secret of the new launch.

    counted: whether it counts against `max_recoveries`. Raises StateChanged.
    """
    secret, values = _next_launch(run, now)
    values["recoveries"] = run.recoveries + counted
    message = f"launch {values['launch']} started: {message}"
    if run.state != RunState.RECOVERING:
        lifecycle.move(
            session, run, RunState.RECOVERING, actor=actor, message=message, lease_token=lease_token, **values
        )
    elif leases.set_held(session, run, lease_token, updated_at=now, **values):
        events.record(session, run.number, actor, "recovery", message)
    else:
        raise lifecycle.StateChanged(f"run {run.id} was taken over or changed its state")
    return secret


def renew_secret(session: Session, run: Run, *, lease_token: int) -> str:
    """A new secret for the current launch, after its old one was lost with another scheduler. Raises StateChanged."""
    secret = new_token("run")
    if not leases.set_held(session, run, lease_token, run_token_sha256=hash_token(secret)):
        raise lifecycle.StateChanged(f"run {run.id} was taken over or changed its state")
    return secret


def fail(session: Session, run: Run, reason: str, detail: str, *, actor: str, lease_token: int) -> None:
    """End a run as failed. Raises StateChanged."""
    if run.state == RunState.QUEUED:  # queued runs cannot fail
        begins = "the run is about to start"
        lifecycle.move(session, run, RunState.STARTING, actor=actor, message=begins, lease_token=lease_token)
    message = f"{reason}: {detail}"
    values: dict[str, Any] = {"reason": reason, "detail": detail}
    lifecycle.move(session, run, RunState.FAILED, actor=actor, message=message, lease_token=lease_token, **values)


def _next_launch(run: Run, now: float) -> tuple[str, dict[str, Any]]:
    secret, launch = new_token("run"), run.launch + 1
    return secret, {
        "launch": launch,
        "job_id": job_id(run.id, launch),
        "run_token_sha256": hash_token(secret),
        "launched_at": now,
        "heartbeat_at": None,
        "phase": None,
        "last_batch": 0,
    }
