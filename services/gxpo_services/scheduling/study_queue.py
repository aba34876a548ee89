"""Queues the next runs of studies."""

from __future__ import annotations

from gxpo_services.db.database import UNAVAILABLE, Database
from gxpo_services.db.tables.runs import STUDY
from gxpo_services.observability import logs
from gxpo_services.scheduling import leases
from gxpo_services.scheduling.error_log import ErrorLog
from gxpo_services.studies import repository, service


class StudyQueue:
    """Notices in which studies a run has ended."""

    def __init__(self, database: Database, errors: ErrorLog) -> None:
        self._database, self._errors = database, errors
        self._ended: dict[int, int] = {}
        """Ended runs of each study when its next runs were queued."""
        self._log = logs.get_logger(__name__)

    def fill(self) -> None:
        """Queue the next runs of each study in which a run has ended since the last call."""
        with self._database.reading() as session:
            ended = repository.ended_runs(session, STUDY)
        self._ended = {
            number: count
            for number, count in ended.items()
            if self._ended.get(number) == count or self._fill_from(number)
        }

    def _fill_from(self, number: int) -> bool:
        """Queue the next runs of a study; False after an error, so that the next call tries again."""
        subject = f"study {number}"
        try:
            with self._database.writing() as session:
                leases.lock_queue(session)
                group = repository.by_number(session, number)
                if group is not None and (made := service.queue_missing(session, group)):
                    self._log.info("study continued", study=group.id, runs=made)
        except UNAVAILABLE:
            raise
        except Exception as error:  # an error of one study must not stop the others, nor the runs
            self._errors.log_once(subject, error, "study cannot continue", group=number)
            return False
        self._errors.clear(subject)
        return True
