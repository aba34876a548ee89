"""A run's folder as the scheduler prepares it for a launch, and what an earlier launch may have left in it."""

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
    """Write config.toml and, for its owner alone, service.json. Each is there whole or not at all.

    Raises pydantic's ValidationError for a config that this version cannot use, OSError.
    """
    text = to_toml(RunConfig.model_validate(run.config), [f"run {run.id}"])
    address = {"url": url, "run": run.id, "attempt": run.launch, "token": token}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, text, 0o644)
    _replace(folder / SERVICE, json.dumps(address, indent=2) + "\n", 0o600)


def is_left(folder: Path) -> bool:
    """Kill the trainer that still has the folder on this machine; False when there is none (any more).

    For a trainer whose job is over, e.g. as the cluster has forgotten it. One on another machine cannot be reached
    from here: its token is worth nothing any more, which ends it at its next step.
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
    """Kill the process that a lock names, if it is that process; whether it was."""
    try:
        pid, start = (int(word) for word in holder)
        process = os.pidfd_open(pid)
    except (ValueError, ProcessLookupError):
        return False
    try:
        # From here on the number cannot pass to another process unnoticed: the descriptor keeps to this one.
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
