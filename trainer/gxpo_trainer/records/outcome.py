"""How a launch ended: outcome.json, and the reason of a failure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.errors import GxpoError
from gxpo_trainer.jsonl import write_json

OUTCOME = "outcome.json"
_LONGEST_MESSAGE = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last word of a launch that came to an end by itself; one that was killed leaves none.

    attempt: number of the launch. ended_by: the bound of the budget that a run that succeeded has reached.
    reason: one of errors.REASONS for a run that failed. time: seconds since 1970.
    """

    attempt: int
    outcome: Literal["succeeded", "failed", "paused", "cancelled"]
    time: float
    ended_by: str | None = None
    reason: str | None = None
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, out_dir: Path) -> None:
        """Replace outcome.json in one step. Raises OSError."""
        write_json(out_dir / OUTCOME, self.as_dict())


def failure_message(error: BaseException) -> str:
    """What went wrong, for people."""
    text = str(error) if isinstance(error, GxpoError) else f"{type(error).__name__}: {error}"
    return text[:_LONGEST_MESSAGE]


def reason_of(error: BaseException, *, setting_up: bool = False) -> str:
    """One of errors.REASONS.

    What the machine lacked (memory, disk, room on the cluster) comes before what the error that reached the top
    says, for it is the cause. setting_up: no step was begun, so an error without a reason is `setup_failed`.
    """
    chain = list(_causes(error))
    for cause in chain:
        found = _lacked(cause)
        if found is not None:
            return found
    for cause in chain:
        if isinstance(cause, GxpoError) and cause.reason != GxpoError.reason:
            return cause.reason
    return "setup_failed" if setting_up else GxpoError.reason


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it came from. An error of a Ray task carries the one of its process as `cause`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, BaseException) and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__cause__, getattr(found, "cause", None)]


def _lacked(error: BaseException) -> str | None:
    """Errors of Ray and torch are told by their names: neither is imported for this."""
    names = {kind.__name__ for kind in type(error).__mro__}
    died_of_memory = "RayActorError" in names and "OutOfMemoryError" in str(error)
    if names & {"MemoryError", "OutOfMemoryError"} or died_of_memory:
        return "out_of_memory"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "OutOfDiskError" in names:
        return "disk_full"
    if names & {"ActorUnschedulableError", "TaskUnschedulableError"}:
        return "no_resources"
    return None
