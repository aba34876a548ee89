"""Deletion of a run's folder: an atomic rename into the trash, then removal.

The folder is named by the server-generated run id. After a crash between the two steps, the next deletion or start
empties the trash; after a crash before the commit, the deletion can be retried.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.orm import Session

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


def empty_trash(root: Path) -> None:
    """Delete everything in the trash; entries that cannot be deleted remain for the next call."""
    trash = root / TRASH
    if not trash.is_dir():
        return
    for entry in trash.iterdir():
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)  # its own links are removed, never followed
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("trash_stays", folder=str(entry), error=str(error))
