"""Prepare a run's folder for a launch, and kill an orphaned trainer of an earlier one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

from gxpo_services.db.tables.runs import Run
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.training.run_lock import LOCK, process_start

CONFIG, SERVICE, LOG = "config.toml", "service.json", "train.log"


def prepare(folder: Path, run: Run, *, url: str, token: str) -> None:
    """Write config.toml and service.json (mode 0600), each atomically.

    Raises pydantic's ValidationError for a config that this version does not support, OSError.
    """
    text = to_toml(RunConfig.model_validate(run.config), [f"run {run.id}"])
    address = {"url": url, "run": run.id, "attempt": run.launch, "token": token}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, text, 0o644)
    _replace(folder / SERVICE, json.dumps(address, indent=2) + "\n", 0o600)


def kill_orphaned_trainer(folder: Path) -> bool:
    """Kill a trainer on this machine that still holds the folder's lock; returns whether there was one.

    Its job is over, e.g. because Ray's head was restarted. An orphan on another machine is not reachable from here: its
    token is invalid, so it stops at its next step.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _kill(folder, os.pread(lock, 100, 0).split())
    else:
        return False
    finally:
        os.close(lock)


def _kill(folder: Path, holder: list[bytes]) -> bool:
    """Kill the process recorded in a lock after verifying its identity; returns whether it was killed."""
    try:
        pid, start = (int(word) for word in holder)
        process = os.pidfd_open(pid)
    except (ValueError, ProcessLookupError):
        return False
    try:
        # The pidfd refers to this process even if its pid is reused.
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if process_start(pid) != start or os.fsencode(folder) not in command:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return False
    finally:
        os.close(process)
    return True


def _replace(path: Path, text: str, mode: int) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
