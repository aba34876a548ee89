"""Logs of a run."""

from __future__ import annotations

from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.db.database import Database
from gxpo_services.db.run_lookup import find_run
from gxpo_services.logs import log_file
from gxpo_services.logs.schemas import LogView
from gxpo_services.run_states import TERMINAL
from gxpo_services.settings import ServiceSettings


def read_log(settings: ServiceSettings, run_id: str, offset: int, limit: int) -> LogView:
    piece = log_file.read_log(RunFiles(settings.artifacts, run_id), offset, limit)
    return LogView(text=piece.text, offset=piece.offset, next_offset=piece.next_offset, size=piece.size)


def is_over(database: Database, run_id: str) -> bool:
    """Whether a run has ended or was deleted."""
    with database.reading() as session:
        found = find_run(session, run_id)
    return found is None or found[1] in TERMINAL
