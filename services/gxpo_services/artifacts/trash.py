"""Deletion of a run's folder: an atomic rename into the trash, then removal.

The folder is named by the server-generated run id. After a crash between the two steps, the next deletion or start
empties the trash; after a crash before the commit, the next start puts the folder back.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.orm import Session

from gxpo_services.db.database import Database
from gxpo_services.db.run_lookup import find_run
from gxpo_services.observability.logs import get_logger

TRASH = ".trash"
_log = get_logger(__name__)


def set_aside(session: Session, root: Path, run_id: str) -> None:
    """Move a run's folder (or a link) into the trash, and back if the session's transaction is rolled back.

    Raises OSError.
    """
    folder, trash = root / run_id, root / TRASH
    trash.mkdir(parents=True, exist_ok=True)
    aside = trash / f"{run_id}-{secrets.token_hex(4)}"
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return

    def put_back(_: Session) -> None:
        if not folder.exists():
            aside.rename(folder)

    # The session is not reused after its commit, so a later rollback cannot occur.
    event.listen(session, "after_rollback", put_back, once=True)


def empty_trash(root: Path, database: Database) -> None:
    """Delete the folders of deleted runs, not those whose deletion is not committed.

    Entries that cannot be deleted remain for the next call.
    """
    for entry in _entries(root):
        with database.reading() as session:
            if find_run(session, _run_id(entry)) is not None:
                continue
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)  # its own links are removed, never followed
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("trash_stays", folder=str(entry), error=str(error))


def restore(root: Path, database: Database) -> None:
    """Put back the folders of runs whose deletion was interrupted before its commit."""
    for entry in _entries(root):
        # The run's lock: another process may be deleting it.
        with database.writing() as session:
            folder = root / _run_id(entry)
            if find_run(session, folder.name, lock=True) is None or folder.exists():
                continue
            try:
                entry.rename(folder)
            except OSError as error:
                _log.warning("trash_stays", folder=str(entry), error=str(error))


def _entries(root: Path) -> list[Path]:
    trash = root / TRASH
    return list(trash.iterdir()) if trash.is_dir() else []


def _run_id(entry: Path) -> str:
    return entry.name.rpartition("-")[0]
