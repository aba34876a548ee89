"""Logs of errors that repeat every round: each once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gxpo_services.observability import logs


class ErrorLog:
    """The latest error of each subject, such as a run or the database."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._log = logs.get_logger(__name__)

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
