"""Retention: delete samples and log of runs that ended long ago. Everything else of a run is kept.

Each transaction deletes few rows, so that reports of trainers do not wait; after a crash in between, the next round
continues. A run is marked as pruned last, so nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from gxpo_services import logging
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run, Sample
from gxpo_services.ingest.drain import FILES
from gxpo_services.outputs import events
from gxpo_services.outputs.files import RunFiles
from gxpo_services.run_states import TERMINAL
from gxpo_services.scheduling.launcher import LOG

DAY_S = 86_400.0
SAMPLES_AT_ONCE = 1_000
BATCHES_AT_ONCE = 20
"""Transactions of one call, so that a round of the scheduler stays short."""
_log = logging.get_logger(__name__)


def prune(database: Database, artifacts: Path, before: float, failed: set[int], *, now: float, actor: str) -> bool:
    """Delete samples and log of runs that ended before `before`; returns whether some may be left for the next call.

    Paused runs have not ended. failed: numbers of runs to skip, to which a run is added whose files cannot be deleted.
    """
    for _ in range(BATCHES_AT_ONCE):
        with database.writing() as session:
            run = _next(session, before, failed)
            if run is None:
                return False
            if _delete_samples(session, run.number):
                continue
            try:
                files = RunFiles(artifacts, run.id)
                for name in (FILES["samples"], LOG):
                    files.remove(name)
            except OSError as error:
                _log.error("cannot delete the files of a run", run=run.id, error=str(error))
                failed.add(run.number)
                continue
            session.execute(update(Run).where(Run.number == run.number).values(pruned_at=now))
            events.record(session, run.number, actor, "pruned", "retention deleted samples and log")
    return True


def _next(session: Session, before: float, failed: Collection[int]) -> Run | None:
    ended = (Run.state.in_(sorted(TERMINAL)), Run.pruned_at.is_(None), Run.ended_at < before)
    query = select(Run).where(*ended, Run.number.not_in(failed)).order_by(Run.number).limit(1)
    return session.scalar(query.with_for_update(of=Run, skip_locked=True))


def _delete_samples(session: Session, run_number: int) -> int:
    """Delete some samples of a run; returns how many."""
    some = select(Sample.number).where(Sample.run_number == run_number).limit(SAMPLES_AT_ONCE)
    query = delete(Sample).where(Sample.number.in_(some)).execution_options(synchronize_session=False)
    return int(session.execute(query).rowcount)  # type: ignore[attr-defined]
