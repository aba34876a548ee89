"""The audit trail: every change of state and every deed of a person or the scheduler, with its actor."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy.orm import Session

from gxpo_services.runs.models import Event


def record(session: Session, run_number: int | None, actor: str, kind: str, message: str, **fields: Any) -> None:
    """Add one event in the caller's transaction: it is there exactly when the change is."""
    session.add(Event(run_number=run_number, time=time.time(), actor=actor, kind=kind, message=message, fields=fields))
