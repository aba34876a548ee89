"""Safe access to a run's folder: no links, no special files, nothing outside.

A trainer writes the folder and may run a submitter's code, so its content is untrusted. Each path component is opened
with openat and O_NOFOLLOW, which is safe against concurrent symlinks. Everything but plain files and folders is treated
as missing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
            return _open_file(folder, name)

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
        """Every plain file below a folder, as its parts below it. Links and files deleted during the walk are left
        out."""
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


def _open_file(folder: int, name: str) -> BinaryIO:
    descriptor = _open(folder, name, _FILE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no plain file", name)
    return os.fdopen(descriptor, "rb", buffering=0)


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
