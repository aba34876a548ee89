"""A directory that belongs to one process, which may be killed: the next owner removes what it left."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from filelock import FileLock, Timeout


class OwnedDirectory:
    """A private directory (mode 0700) of this process, called `prefix` and a random suffix, under `root`.

    `close` or the end of the process removes it; after a kill the next OwnedDirectory of the same root and prefix does,
    because the kernel has released the owner's file lock.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        remove_abandoned(root, prefix)
        fresh = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        lock = _owner_lock(fresh)
        lock.acquire()
        # Renamed after it is locked: `remove_abandoned` considers final names only.
        self.path = fresh.rename(root / fresh.name.removeprefix("."))
        self._close = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the directory and everything in it."""
        self._close()


def remove_abandoned(root: Path, prefix: str) -> list[Path]:
    """Remove and return the directories whose owners died without closing."""
    return [directory for directory in root.glob(f"{prefix}*") if remove_if_abandoned(directory)]


def remove_if_abandoned(directory: Path, wait_s: float = 0.0) -> bool:
    """Remove a directory whose owner has died, or does so within `wait_s`; whether it was removed."""
    lock = _owner_lock(directory)
    try:
        if directory.stat().st_uid != os.getuid():
            return False
        lock.acquire(timeout=wait_s, blocking=wait_s > 0)
    except (Timeout, FileNotFoundError):
        return False  # in use, or removed by its owner just now
    _remove(directory, lock)
    return True


def _owner_lock(directory: Path) -> FileLock:
    return FileLock(directory / "owner.lock", mode=0o600, blocking=False, thread_local=False)


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()
