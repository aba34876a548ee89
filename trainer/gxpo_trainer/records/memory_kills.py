"""Ray's report of processes that its memory monitor killed, in two sentences. Pure.

The report is the text of ray.exceptions.OutOfMemoryError (Ray 2.56): about 4 KB with the node's memory, the killed
workers and the largest processes of the node. Its "GB" are GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = "running low on memory"
_NODE = re.compile(r"\(IP: ([^,\s]+),[^)]*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of (\d+)B")
_KILLED = re.compile(r"task name=([^,]+),.*?\bpid=(\d+), actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_LONGEST_LINE = 300


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the node. gib: its memory."""

    pid: int
    gib: float
    name: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}, {self.gib:g} GiB)"


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """A kill by the memory monitor. largest: the process that used most memory on the node, if the report says so.

    text: one or two sentences for the user.
    """

    killed: tuple[Process, ...]
    largest: Process | None
    text: str

    @property
    def is_victim(self) -> bool:
        """Whether a process that was not killed used most memory.

        It may be another process of the same run: Ray's report does not say to which run a process belongs. The number
        of recoveries is limited, so a run that exhausts memory by itself still fails.
        """
        return self.largest is not None and self.largest.pid not in {process.pid for process in self.killed}


def parse_memory_kill(report: str) -> MemoryKill | None:
    """The kill in Ray's report; None for any other text. A report of an unknown format keeps its first line."""
    if _MARK not in report:
        return None
    killed = tuple(Process(int(pid), float(gib), task.partition(".")[0]) for task, pid, gib in _KILLED.findall(report))
    users = [Process(int(pid), float(gib), command.strip()[:100]) for pid, gib, command in _USER.findall(report)]
    largest = max(users, key=lambda process: process.gib, default=None)
    node, threshold = _NODE.search(report), _THRESHOLD.search(report)
    if not killed or node is None:
        line = next(line for line in report.splitlines() if _MARK in line)
        return MemoryKill(killed, largest, line.strip()[:_LONGEST_LINE])
    address, used, total = node.groups()
    limit = f"{int(threshold[1]) / 2**30:.2f} of {total} GiB" if threshold else f"{total} GiB"
    names = ", ".join(map(str, killed))
    text = f"Ray killed {names}: node {address} had {used} GiB of memory in use, and its limit is {limit}."
    found = MemoryKill(killed, largest, text)
    if largest is not None and found.is_victim:
        return MemoryKill(killed, largest, f"{text} {largest} used most.")
    return found
