"""One trainer a folder: a lock that the kernel lets go of when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from gxpo_trainer.errors import ConfigError, TrainingError

LOCK = ".lock"
WAIT_S = 60.0
"""How long an earlier trainer of the folder, which may be about to end, is waited for."""
_POLL_S = 0.2


class RunLock:
    """flock on `<run folder>/.lock`, which says who holds it: "<pid> <start of the process in clock ticks>"."""

    def __init__(self, out_dir: Path, wait_s: float = WAIT_S) -> None:
        self.path = out_dir / LOCK
        self._wait_s = wait_s
        self._fd = -1
        self._made_folder = False

    def acquire(self) -> None:
        """Make the folder where it is missing and take its lock.

        Raises TrainingError when another trainer keeps it, ConfigError when the folder cannot be written.
        """
        deadline = time.monotonic() + self._wait_s
        while not self._taken():
            if time.monotonic() >= deadline:
                raise TrainingError(
                    f"{self.path.parent} is in use by another trainer (process {self._holder()}); wait for it to end, "
                    "or name another folder"
                )
            time.sleep(_POLL_S)
        line = f"{os.getpid()} {process_start(os.getpid())}\n".encode()
        if os.pread(self._fd, 100, 0) != line:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, line, 0)

    def release(self, *, discard: bool = False) -> None:
        """Let go. discard: leave nothing behind of a folder that this lock made and that holds nothing else."""
        if self._fd < 0:
            return
        if discard and self._made_folder and [entry.name for entry in self.path.parent.iterdir()] == [LOCK]:
            self.path.unlink()
            with contextlib.suppress(OSError):  # somebody has put a file there meanwhile
                self.path.parent.rmdir()
        os.close(self._fd)
        self._fd = -1

    def _taken(self) -> bool:
        folder = self.path.parent
        try:
            self._made_folder = self._made_folder or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return self._try()
        except FileNotFoundError:  # its holder has just discarded the folder
            return False
        except OSError as error:
            raise ConfigError(f"--out {folder} cannot be used: {error.strerror}; name another folder") from error

    def _try(self) -> bool:
        # Python's descriptors end at exec, so no process that a trainer starts keeps its lock.
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock file that was discarded meanwhile locks nothing.
            held = os.path.samestat(os.fstat(fd), self.path.stat())
        except BlockingIOError:
            held = False
        except OSError:
            os.close(fd)
            raise
        if held:
            self._fd = fd
        else:
            os.close(fd)
        return held

    def _holder(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError):
            return "unknown"


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; 0 where /proc does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    # The second field is the program's name in parentheses and may hold spaces; field 22 is the 20th after it.
    return int(text.rpartition(")")[2].split()[19])
