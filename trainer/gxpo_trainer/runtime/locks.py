"""Folders that belong to one process, by a lock that the kernel releases when the process ends, even by a kill.

`OwnedDirectory` is private to a process, and the next owner removes one whose owner died. `RunLock` allows one trainer
per run folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from filelock import FileLock, Timeout

from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.jsonl import make_folder

LOCK = ".lock"
WAIT_S = 60.0
"""Time to wait for an earlier trainer of the folder, which may be about to end."""
_POLL_S = 0.2


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
        self.close = weakref.finalize(self, _remove, self.path, lock)
        """Removes the directory and everything in it."""


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


class RunLock:
    """flock on `<run folder>/.lock`, which contains its holder: "<pid> <start of the process in clock ticks>"."""

    def __init__(self, out_dir: Path, wait_s: float = WAIT_S) -> None:
        self.path = out_dir / LOCK
        self._wait_s = wait_s
        self._fd = -1
        self._made_folder = False

    def acquire(self) -> None:
        """Create the folder if it is missing and acquire its lock.

        Raises TrainingError when another trainer holds it, ConfigError when the folder cannot be written.
        """
        deadline = time.monotonic() + self._wait_s
        while not self._taken():
            if time.monotonic() >= deadline:
                raise TrainingError(
                    f"{self.path.parent} is in use by another trainer (process {self._holder()}); wait for it to end, "
                    "or choose another folder"
                )
            time.sleep(_POLL_S)
        line = f"{os.getpid()} {process_start(os.getpid())}\n".encode()
        if os.pread(self._fd, 100, 0) != line:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, line, 0)

    def release(self, *, discard: bool = False) -> None:
        """Release the lock. discard: delete the folder if this lock created it and it contains nothing else."""
        if self._fd < 0:
            return
        if discard and self._made_folder and [entry.name for entry in self.path.parent.iterdir()] == [LOCK]:
            self.path.unlink()
            with contextlib.suppress(OSError):  # another process has created a file there
                self.path.parent.rmdir()
        os.close(self._fd)
        self._fd = -1

    def _taken(self) -> bool:
        folder = self.path.parent
        self._made_folder = self._made_folder or not folder.exists()
        make_folder(folder)
        fd = -1
        try:
            # Python's descriptors end at exec, so no process that a trainer starts keeps its lock.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder may have deleted the lock file in between.
            if os.path.samestat(os.fstat(fd), self.path.stat()):
                self._fd = fd
        except (BlockingIOError, FileNotFoundError):  # it is held, or its holder has just discarded the folder
            pass
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot write into it ({error.strerror}); choose another") from error
        finally:
            if fd not in (-1, self._fd):
                os.close(fd)
        return self._fd >= 0

    def _holder(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError):
            return "unknown"


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    # The second field is the program's name in parentheses and may hold spaces; field 22 is the 20th after it.
    return int(text.rpartition(")")[2].split()[19])
