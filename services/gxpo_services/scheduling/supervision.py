"""What the scheduler does about a run, from its state, its job and the time that has passed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gxpo_services.run_states import RunState
from gxpo_services.scheduling.launcher import JobStatus

Deed = Literal["wait", "submit", "stop", "finish"]
"""submit: start the job of the present launch. stop: end the job. finish: the launch is over, see what became of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; see ServiceSettings."""

    start_s: float
    heartbeat_s: float
    cancel_grace_s: float
    pause_grace_s: float


def next_deed(
    state: RunState, job: JobStatus, *, launch_age_s: float, silence_s: float, wish_age_s: float, limits: Limits
) -> tuple[Deed, str]:
    """The deed and the reason in words.

    launch_age_s: since the launch was decided. silence_s: since the trainer was last heard, or could not have been.
    wish_age_s: since pause or cancel was asked.
    """
    begins = state in (RunState.STARTING, RunState.RECOVERING)
    if begins and job.state == "unknown" and launch_age_s <= limits.start_s:
        return "submit", "the launch has no job yet"
    if not job.is_alive:
        return "finish", _ended(job)
    if begins:
        return _stop_after(silence_s, limits.start_s, "its trainer did not report within start_s")
    if state is RunState.CANCELLING:
        return _stop_after(wish_age_s, limits.cancel_grace_s, "it did not stop by itself within cancel_grace_s")
    if state is RunState.PAUSING and wish_age_s > limits.pause_grace_s:
        return "stop", f"it did not pause by itself within pause_grace_s = {limits.pause_grace_s:g} s"
    return _stop_after(silence_s, limits.heartbeat_s, "its trainer was silent for longer than heartbeat_s")


def _stop_after(age_s: float, limit_s: float, why: str) -> tuple[Deed, str]:
    return ("stop", f"{why} = {limit_s:g} s") if age_s > limit_s else ("wait", "")


def _ended(job: JobStatus) -> str:
    if job.state == "unknown":
        return "the launcher no longer knows its job"
    return f"its job has {'ended' if job.state == 'succeeded' else job.state}, without an outcome"


def lost_in_vain(steps: Iterable[int]) -> int:
    """Losses since the run last came further than ever before.

    steps: the step that the run was at when each of its jobs was lost, in order.
    """
    furthest = count = 0
    for step in steps:
        count = 0 if step > furthest else count + 1
        furthest = max(furthest, step)
    return count


def failure_reason(state: RunState, job: JobStatus) -> str:
    """One of errors.REASONS for a run that may not be recovered again."""
    if job.out_of_memory:
        return "out_of_memory"
    return "setup_failed" if state in (RunState.STARTING, RunState.RECOVERING) else "lost_heartbeat"
