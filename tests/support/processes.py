"""Processes of this machine: which live, and which were started with some variables."""

from __future__ import annotations

import psutil


def processes_with(**variables: str | None) -> set[int]:
    """Ids of the processes, without zombies, that were started with these variables. None: with any value."""
    ids = set()
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            fits = all(name in environment and value in (None, environment[name]) for name, value in variables.items())
            if fits and process.status() != psutil.STATUS_ZOMBIE:
                ids.add(process.pid)
        except psutil.Error:  # of another user, or ended meanwhile
            continue
    return ids


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
