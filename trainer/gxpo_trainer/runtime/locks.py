"""Folders that belong to one process, by a lock that the kernel releases when the process ends, even by a kill.

`OwnedDirectory` is private to a process, and the next owner removes one whose owner died. `RunLock` allows one trainer
per run folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.jsonl import make_folder

LOCK = ".lock"
WAIT_S = 60.0
"""Time to wait for an earlier trainer of the folder, which may be about to end."""
_POLL_S = 0.2
OWNER = "owner.lock"
_OwnerLock = partial(FileLock, mode=0o600, blocking=False, thread_local=False)


class OwnedDirectory:
    """A private directory (mode 0700) of this process, called `prefix` and a random suffix, under `root`.

    `close` or the end of the process removes it; after a kill the next OwnedDirectory of the same root and prefix does,
    because the kernel has released the owner's file lock.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        remove_abandoned(root, prefix)
        fresh = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        lock = _OwnerLock(fresh / OWNER)
        lock.acquire()
        # Renamed after it is locked: `remove_abandoned` considers final names only.
        self.path = fresh.rename(root / fresh.name.removeprefix("."))
        self.close = weakref.finalize(self, _remove, self.path, lock)
        """Removes the directory and everything in it."""


def remove_abandoned(root: Path, prefix: str) -> list[Path]:
    """Remove and return the directories whose owners died without closing."""
    return [directory for directory in root.glob(f"{prefix}*") if remove_if_abandoned(directory)]


def remove_if_abandoned(directory: Path, wait_s: float = 0.0) -> bool:
    """Remove a directory whose owner has died, or does so within `wait_s`; whether it was removed."""
    lock = _OwnerLock(directory / OWNER)
    try:
        if directory.stat().st_uid != os.getuid():
            return False
        lock.acquire(timeout=wait_s, blocking=wait_s > 0)
    except (Timeout, FileNotFoundError):
        return False  # in use, or removed by its owner just now
    _remove(directory, lock)
    return True


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()


class RunLock:
    """Lock of `<run folder>/.lock`, which contains its holder: "<pid> <start of the process in clock ticks>"."""

    def __init__(self, out_dir: Path, wait_s: float = WAIT_S) -> None:
        self.path = out_dir / LOCK
        self._lock = FileLock(self.path, wait_s, thread_local=False, poll_interval=_POLL_S, fallback_to_soft=False)
        self._made_folder = False

    def acquire(self) -> None:
        """Create the folder if it is missing and acquire its lock.

        Raises TrainingError when another trainer holds it, ConfigError when the folder cannot be written.
        """
        folder = self.path.parent
        line = f"{os.getpid()} {process_start(os.getpid())}\n"
        try:
            while not self._lock.is_locked:
                self._made_folder = self._made_folder or not folder.exists()
                make_folder(folder)
                with contextlib.suppress(FileNotFoundError):  # its holder has just discarded the folder
                    self._lock.acquire()
            if self.path.read_text(encoding="utf-8") != line:
                self.path.write_text(line, encoding="utf-8")
        except Timeout as error:
            holder = "unknown"
            with contextlib.suppress(OSError, IndexError):
                holder = self.path.read_text(encoding="utf-8").split()[0]
            raise TrainingError(
                f"{folder} is in use by another trainer (process {holder}); wait for it to end, or choose another"
            ) from error
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot write into it ({error.strerror}); choose another") from error

    def release(self, *, discard: bool = False) -> None:
        """Release the lock. discard: delete the folder if this lock created it and it contains nothing else."""
        if not self._lock.is_locked:
            return
        if discard and self._made_folder and [entry.name for entry in self.path.parent.iterdir()] == [LOCK]:
            self.path.unlink()
            with contextlib.suppress(OSError):  # another process has created a file there
                self.path.parent.rmdir()
        self._lock.release()


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    # The second field is the program's name in parentheses and may hold spaces; field 22 is the 20th after it.
    return int(text.rpartition(")")[2].split()[19])
