"""Outcome of a launch: outcome.json, the failure reason, and whether the run should be launched again.

A kill by Ray's memory monitor is told in two sentences. Its report is the text of ray.exceptions.OutOfMemoryError
(Ray 2.56): about 4 KB with the node's memory, the killed workers and the largest processes of the node, in "GB" that
are GiB.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gxpo_trainer.errors import GxpoError, Stalled

_MARK = "running low on memory"
_NODE = re.compile(r"\(IP: ([^,\s]+),[^)]*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of (\d+)B")
_KILLED = re.compile(r"task name=([^,]+),.*?\bpid=(\d+), actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_LONGEST_LINE = 300


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """A kill by the memory monitor. text: one or two sentences for the user.

    is_victim: whether a process that was not killed used most memory. It may be another process of the same run: Ray's
    report does not say to which run a process belongs. The number of recoveries is limited, so a run that exhausts
    memory by itself still fails.
    """

    text: str
    is_victim: bool


def memory_kill(error: BaseException) -> MemoryKill | None:
    """The kill by Ray's memory monitor that led to an error, if any. A report of an unknown format keeps one line."""
    report = next((text for cause in _causes(error) if _MARK in (text := str(cause))), None)
    if report is None:
        return None
    killed = {pid: (task.partition(".")[0], gib) for task, pid, gib in _KILLED.findall(report)}
    users = [(float(gib), pid, command.strip()[:100]) for pid, gib, command in _USER.findall(report)]
    most, largest, command = max(users, default=(0.0, None, ""))
    is_victim = largest is not None and largest not in killed
    node, threshold = _NODE.search(report), _THRESHOLD.search(report)
    if not killed or node is None:
        line = next(line for line in report.splitlines() if _MARK in line)
        return MemoryKill(line.strip()[:_LONGEST_LINE], is_victim)
    address, used, total = node.groups()
    limit = f"{int(threshold[1]) / 2**30:.2f} of {total} GiB" if threshold else f"{total} GiB"
    names = ", ".join(f"{name} (process {pid}, {float(gib):g} GiB)" for pid, (name, gib) in killed.items())
    text = f"Ray killed {names}: node {address} had {used} GiB of memory in use, and its limit is {limit}."
    return MemoryKill(
        f"{text} {command} (process {largest}, {most:g} GiB) used most." if is_victim else text, is_victim
    )


OUTCOME = "outcome.json"
_LONGEST_MESSAGE = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a launch that ended by itself; a killed one leaves none.

    attempt: number of the launch. time: seconds since 1970. ended_by: the budget limit that a succeeded run reached.
    reason: one of errors.REASONS for a failed run. recoverable: the cause is outside of the run, so that a service
    should launch a failed run again.
    """

    attempt: int
    outcome: Literal["succeeded", "failed", "paused", "cancelled"]
    time: float
    ended_by: str | None = None
    reason: str | None = None
    message: str = ""
    recoverable: bool = False


def failure_message(error: BaseException) -> str:
    """Error message for the user, shortened. A kill by Ray's memory monitor is described in two sentences.

    NUL and lone surrogates, which databases cannot store, are escaped.
    """
    kill = memory_kill(error)
    if kill is not None and not isinstance(error, GxpoError):
        return kill.text
    text = str(error) if isinstance(error, GxpoError) else f"{type(error).__name__}: {error}"
    text = text if kill is None else f"{text}. {kill.text}"
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")[:_LONGEST_MESSAGE]


def reason_of(error: BaseException, *, setting_up: bool = False) -> str:
    """Map an error to one of errors.REASONS.

    Exhausted resources (memory, disk, cluster) anywhere in the chain of causes take precedence over the error's own
    reason. setting_up: no step has begun, so an error without a reason is `setup_failed`.
    """
    chain = list(_causes(error))
    resources = [resource for cause in chain if (resource := _exhausted_resource(cause))]
    reasons = [cause.reason for cause in chain if isinstance(cause, GxpoError) and cause.reason != GxpoError.reason]
    return [*resources, *reasons, "setup_failed" if setting_up else GxpoError.reason][0]


def is_recoverable(error: BaseException) -> bool:
    """Whether the same run may succeed when it is launched again: it stalled, was killed for the memory that another
    process used, or the disk was full."""
    kill = memory_kill(error)
    is_victim = kill is not None and kill.is_victim
    return is_victim or any(isinstance(cause, Stalled) for cause in _causes(error)) or reason_of(error) == "disk_full"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, breadth first. Errors of Ray tasks hold the original exception in `cause`."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        cause = queue.pop(0)
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            queue += [cause.__cause__, getattr(cause, "cause", None)]


def _exhausted_resource(error: BaseException) -> str | None:
    """Failure reason of an exhausted resource. Compares class names, to avoid importing Ray and torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error) if "RayActorError" in names else ""
    if names & {"MemoryError", "OutOfMemoryError"} or "OutOfMemoryError" in text or _MARK in text:
        return "out_of_memory"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "OutOfDiskError" in names:
        return "disk_full"
    if names & {"ActorUnschedulableError", "TaskUnschedulableError"}:
        return "no_resources"
    return None
