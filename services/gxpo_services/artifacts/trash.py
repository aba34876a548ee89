"""Removing a run's folder: first out of the way in one step, then for good.

The folder's name is the id that the server gave the run, so that no client can name another. A crash between the two
steps leaves a folder in the trash, which the next removal or start empties; one before the database's commit leaves a
run without its files, whose deletion can be asked again.
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
    """Move a run's folder into the trash; back again if the session's transaction fails. A link is moved as a link.

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

    # The session lives as long as its request: after a commit nobody rolls it back.
    event.listen(session, "after_rollback", put_back, once=True)


def empty_trash(root: Path) -> None:
    """Delete everything in the trash, also what a crash has left there. What cannot be deleted now stays for later."""
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
