"""Safe access to a run's folder, and its deletion.

A trainer writes the folder and may run a submitter's code, so its content is untrusted. Each path component is opened
with openat and O_NOFOLLOW, which is safe against concurrent symlinks. Everything but plain files and folders is treated
as missing.

A deletion is an atomic rename into the trash, then removal. After a crash between the two, the next deletion or start
empties the trash; after a crash before the commit, the next start puts the folder back."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import event
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import find_run
from gxpo_services.db.database import Database
from gxpo_services.logging import get_logger

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.EACCES)
_DEEPEST = 8


class RunFiles:
    """The folder of one run. `parts` are names below it, one a level; FileNotFoundError where there is none."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._root, self._run_id = root, run_id

    def open(self, *parts: str) -> BinaryIO:
        """A plain file, opened for reading without a buffer of its own."""
        *folders, name = parts
        with self._folder(*folders) as folder:
            descriptor = _open(folder, name, _FILE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "no plain file", name)
        return os.fdopen(descriptor, "rb", buffering=0)

    def read(self, *parts: str, most_bytes: int) -> bytes:
        """A small file whole. Raises ValueError when it is larger than `most_bytes`."""
        with self.open(*parts) as file:
            data = b""
            while piece := file.read(most_bytes + 1 - len(data)):
                data += piece
        if len(data) > most_bytes:
            raise ValueError(f"{'/'.join(parts)} is larger than {most_bytes} bytes")
        return data

    def names(self, *parts: str) -> list[str]:
        """What a folder holds, in order; files, folders and anything else."""
        with self._folder(*parts) as folder:
            return sorted(os.listdir(folder))  # noqa: PTH208 - of an open folder

    def files(self, *parts: str) -> list[tuple[str, ...]]:
        """Every plain file below a folder, as its parts below it. Links and deleted files are left out."""
        with self._folder(*parts) as folder:
            return list(_walk(folder, (), _DEEPEST))

    def status(self, *parts: str) -> os.stat_result:
        """Of the thing itself, never of what a link names."""
        *folders, name = parts
        with self._folder(*folders) as folder:
            return _status(folder, name)

    def remove(self, *parts: str) -> None:
        """Delete a file, or a link instead of what it names; does nothing where there is none."""
        *folders, name = parts
        try:
            with self._folder(*folders) as folder:
                _status(folder, name)
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass

    @contextmanager
    def _folder(self, *parts: str) -> Iterator[int]:
        try:
            # The root is the admin's own setting and may well be a link; what is below it may not.
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _absent(error) from error
        try:
            for part in (self._run_id, *parts):
                inner = _open(descriptor, part, _FOLDER)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _check_name(name: str) -> None:
    """Raises FileNotFoundError for what is not the name of one entry of a folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileNotFoundError(errno.ENOENT, "no name of a file", name)


def _open(folder: int, name: str, flags: int) -> int:
    _check_name(name)
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise _absent(error) from error


def _status(folder: int, name: str) -> os.stat_result:
    _check_name(name)
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise _absent(error) from error


def _walk(folder: int, above: tuple[str, ...], levels: int) -> Iterator[tuple[str, ...]]:
    for name in sorted(os.listdir(folder)):
        try:
            mode = _status(folder, name).st_mode
            if stat.S_ISREG(mode):
                yield (*above, name)
            elif stat.S_ISDIR(mode) and levels > 1:
                inner = _open(folder, name, _FOLDER)
                try:
                    yield from _walk(inner, (*above, name), levels - 1)
                finally:
                    os.close(inner)
        except FileNotFoundError:
            continue  # deleted since it was listed


def _absent(error: OSError) -> OSError:
    """FileNotFoundError for all that means: there is no such file here. Other errors stay what they are."""
    if error.errno in _ABSENT:
        return FileNotFoundError(errno.ENOENT, "there is no such file in the run's folder", error.filename)
    return error


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
