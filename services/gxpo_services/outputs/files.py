"""Safe access to a run's folder, and its deletion.

A trainer writes the folder and may run a submitter's code, so its content is untrusted. Each path component is opened
with openat and O_NOFOLLOW, which is safe against concurrent symlinks. Everything but plain files and folders is treated
as missing.

The folder of a deleted run is removed after the commit. The audit trail names the deleted runs: after a crash the next
deletion or start removes what is left of them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import select

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event
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
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ValueError(f"{'/'.join(parts)} is larger than {most_bytes} bytes")
        return data

    def names(self, *parts: str) -> list[str]:
        """What a folder holds, in order; files, folders and anything else."""
        with self._folder(*parts) as folder:
            return sorted(os.listdir(folder))  # noqa: PTH208 - of an open folder

    def files(self, *parts: str) -> list[tuple[str, ...]]:
        """Every plain file below a folder, as its parts below it. Links and deleted files are left out."""
        paths: list[tuple[str, ...]] = []
        with self._folder(*parts) as folder:
            for top, folders, names, inner in os.fwalk(".", dir_fd=folder):
                above = Path(top).parts
                if len(above) == _DEEPEST - 1:
                    folders.clear()
                folders.sort()
                paths += [(*above, name) for name in sorted(names) if _is_file(inner, name)]
        return paths

    def status(self, *parts: str) -> os.stat_result:
        """Of the thing itself, never of what a link names."""
        *folders, name = parts
        with self._folder(*folders) as folder:
            return _status(folder, name)

    def remove(self, *parts: str) -> None:
        """Delete a file, or a link instead of what it names; does nothing where there is none."""
        *folders, name = parts
        with suppress(FileNotFoundError), self._folder(*folders) as folder:
            _status(folder, name)
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _folder(self, *parts: str) -> Iterator[int]:
        with _absent():
            # The root is the admin's own setting and may well be a link; what is below it may not.
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in (self._run_id, *parts):
                inner = _open(descriptor, part, _FOLDER)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _open(folder: int, name: str, flags: int) -> int:
    with _absent(name):
        return os.open(name, flags, dir_fd=folder)


def _status(folder: int, name: str) -> os.stat_result:
    with _absent(name):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(_status(folder, name).st_mode)
    except FileNotFoundError:
        return False  # deleted since it was listed


@contextmanager
def _absent(name: str | None = None) -> Iterator[None]:
    """Raise FileNotFoundError for all that means: there is no such file here. Other errors stay what they are.

    name: to be opened; anything but the name of one entry of a folder is absent.
    """
    if name is not None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        raise FileNotFoundError(errno.ENOENT, "no name of a file", name)
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        text = "there is no such file in the run's folder"
        raise FileNotFoundError(errno.ENOENT, text, error.filename) from error


RUN_DELETED = "run_deleted"
"""Kind of the event of a deletion, whose field `run` names the run."""
_log = get_logger(__name__)


def remove_deleted(root: Path, database: Database) -> None:
    """Remove the folders of deleted runs; those that cannot be removed stay until the next call."""
    with database.reading() as session:
        deletions = session.scalars(select(Event.fields).where(Event.run_number.is_(None), Event.kind == RUN_DELETED))
        deleted = {fields["run"] for fields in deletions}
    for entry in [entry for entry in root.iterdir() if entry.name in deleted] if root.is_dir() else []:
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)  # its own links are removed, never followed
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("folder_stays", folder=str(entry), error=str(error))
