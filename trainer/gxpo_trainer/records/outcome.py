"""Outcome of a launch: outcome.json and the failure reason."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.errors import GxpoError, Stalled
from gxpo_trainer.jsonl import write_json
from gxpo_trainer.records.memory_kills import MemoryKill, parse_memory_kill

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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, out_dir: Path) -> None:
        """Replace outcome.json atomically. Raises OSError."""
        write_json(out_dir / OUTCOME, self.as_dict())


def failure_message(error: BaseException) -> str:
    """Error message for the user, shortened. A kill by Ray's memory monitor is described in two sentences.

    NUL and lone surrogates, which databases cannot store, are escaped.
    """
    kill = _memory_kill(error)
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
    for cause in chain:
        if (resource := _exhausted_resource(cause)) is not None:
            return resource
    for cause in chain:
        if isinstance(cause, GxpoError) and cause.reason != GxpoError.reason:
            return cause.reason
    return "setup_failed" if setting_up else GxpoError.reason


def is_recoverable(error: BaseException) -> bool:
    """Whether the same run may succeed when it is launched again: it stalled, was killed for the memory that another
    process used, or found the disk full."""
    kill = _memory_kill(error)
    is_victim = kill is not None and kill.is_victim
    return is_victim or any(isinstance(cause, Stalled) for cause in _causes(error)) or reason_of(error) == "disk_full"


def _memory_kill(error: BaseException) -> MemoryKill | None:
    """The kill by Ray's memory monitor that led to an error, if any."""
    found = (parse_memory_kill(str(cause)) for cause in _causes(error))
    return next((kill for kill in found if kill is not None), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, breadth first. Errors of Ray tasks hold the original exception in `cause`."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        found = queue.pop(0)
        if isinstance(found, BaseException) and id(found) not in seen:
            seen.add(id(found))
            yield found
            queue += [found.__cause__, getattr(found, "cause", None)]


def _exhausted_resource(error: BaseException) -> str | None:
    """Failure reason of an exhausted resource. Compares class names, to avoid importing Ray and torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error) if "RayActorError" in names else ""
    died_of_memory = "OutOfMemoryError" in text or parse_memory_kill(text) is not None
    if names & {"MemoryError", "OutOfMemoryError"} or died_of_memory:
        return "out_of_memory"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "OutOfDiskError" in names:
        return "disk_full"
    if names & {"ActorUnschedulableError", "TaskUnschedulableError"}:
        return "no_resources"
    return None
