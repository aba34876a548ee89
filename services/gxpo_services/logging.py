"""Structured logs: one line per event, with request id and run id where known."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


def configure(*, as_json: bool) -> None:
    """Send structlog and standard library loggers to stderr in one format. Idempotent."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    logger = logging.getLogger("gxpo_services")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger


class ErrorLog:
    """Logs errors that repeat in every round once: the latest error of each subject, such as a run or the database."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._log = get_logger(__name__)

    def recovered(self, subject: str) -> None:
        """Log the end of an outage, if there was one."""
        if self._errors.pop(subject, None) is not None:
            self._log.info("available again", what=subject)

    @contextmanager
    def once(self, subject: str, message: str, *passed: type[Exception], **values: Any) -> Iterator[None]:
        """Log an error of the block with its traceback, unless it is the latest one of `subject`, and suppress it.

        passed: errors that are raised.
        """
        try:
            yield
        except passed:
            raise
        except Exception as error:
            if self._errors.get(subject) != repr(error):
                self._errors[subject] = repr(error)
                self._log.exception(message, **values)
        else:
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
            self.recovered(subject)
