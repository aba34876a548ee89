"""What a scheduler has done since its start, written to the database for `/metrics`.

Logs of errors that repeat every round: each once.

A file in a scheduler's home whose time is that of its last round, for health checks of its container.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from gxpo_services import logging
from gxpo_services.db.tables import SchedulerRow

KEPT_S = 86_400.0
"""Time after its last round in which a scheduler that is gone is still shown."""


@dataclass(slots=True)
class Counters:
    """launches: jobs submitted. recoveries: runs relaunched. lost_leases: runs that another scheduler took over.

    claims: runs taken from the queue. queue_wait_s: the sum of their waits.
    """

    launches: int = 0
    recoveries: int = 0
    lost_leases: int = 0
    claims: int = 0
    queue_wait_s: float = 0.0

    def write(self, session: Session, owner: str, now: float) -> None:
        """Store the counters of a scheduler, and forget schedulers that are long gone."""
        session.merge(SchedulerRow(owner=owner, ticked_at=now, **asdict(self)))
        session.execute(delete(SchedulerRow).where(SchedulerRow.ticked_at < now - KEPT_S))


class ErrorLog:
    """The latest error of each subject, such as a run or the database."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._log = logging.get_logger(__name__)

    def log_once(self, subject: str, error: Exception, message: str, **values: Any) -> None:
        """Log the error being handled with its traceback, unless it is the latest one of `subject`."""
        if self._errors.get(subject) != repr(error):
            self._errors[subject] = repr(error)
            self._log.exception(message, **values)

    def clear(self, subject: str) -> None:
        """Note that `subject` has no error any more."""
        self._errors.pop(subject, None)

    @contextmanager
    def outages(self, subject: str, *kinds: type[Exception]) -> Iterator[None]:
        """Log the start and the end of an outage once each, and suppress its errors."""
        try:
            yield
        except kinds as error:
            if subject not in self._errors:
                self._log.error("unavailable; retrying", what=subject, error=str(error))
            self._errors[subject] = str(error)
        else:
            if self._errors.pop(subject, None) is not None:
                self._log.info("available again", what=subject)


FILE = "scheduler-round"
LONGEST_ROUND_S = 120.0
"""A round waits for Ray and for the database, each at most a minute."""


def mark(home: Path) -> None:
    """Note the end of a round. A disk that fails is no reason to stop."""
    with suppress(OSError):
        (home / FILE).touch()


def age_s(home: Path) -> float | None:
    """Seconds since the last round of a scheduler with this home; None before the first."""
    try:
        return time.time() - (home / FILE).stat().st_mtime
    except FileNotFoundError:
        return None
