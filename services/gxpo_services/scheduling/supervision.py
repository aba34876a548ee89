"""The scheduler's next action for a run, from its state, its job and elapsed times. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gxpo_services.run_states import RunState
from gxpo_services.scheduling.launcher import JobStatus

Action = Literal["wait", "submit", "stop", "finish"]
"""submit: start the job of the current launch. stop: stop the job. finish: the launch is over, conclude it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; see ServiceSettings."""

    start_s: float
    heartbeat_s: float
    cancel_grace_s: float
    pause_grace_s: float


def next_action(
    state: RunState, job: JobStatus, *, launch_age_s: float, silence_s: float, request_age_s: float, limits: Limits
) -> tuple[Action, str]:
    """The next action and its reason.

    launch_age_s: since the launch was recorded. silence_s: since the last heartbeat or API outage. request_age_s: since
    the pause or cancel request.
    """
    begins = state in (RunState.STARTING, RunState.RECOVERING)
    if begins and job.state == "unknown" and launch_age_s <= limits.start_s:
        return "submit", "the launch has no job yet"
    if not job.is_alive:
        return "finish", _ended(job)
    if begins:
        return _stop_after(silence_s, limits.start_s, "its trainer sent no heartbeat within start_s")
    if state is RunState.CANCELLING:
        return _stop_after(request_age_s, limits.cancel_grace_s, "it did not stop within cancel_grace_s")
    if state is RunState.PAUSING and request_age_s > limits.pause_grace_s:
        return "stop", f"it did not pause within pause_grace_s = {limits.pause_grace_s:g} s"
    return _stop_after(silence_s, limits.heartbeat_s, "its trainer sent no heartbeat for longer than heartbeat_s")


def _stop_after(age_s: float, limit_s: float, why: str) -> tuple[Action, str]:
    return ("stop", f"{why} = {limit_s:g} s") if age_s > limit_s else ("wait", "")


def _ended(job: JobStatus) -> str:
    if job.state == "unknown":
        return "the launcher no longer knows its job"
    return f"its job has {'ended' if job.state == 'succeeded' else job.state}, without an outcome"


def losses_without_progress(steps: Iterable[int]) -> int:
    """Number of consecutive losses, the last one included, since the run last made progress.

    steps: step of the run at each loss of a job, in order.
    """
    furthest = count = 0
    for step in steps:
        count = 1 if step > furthest else count + 1
        furthest = max(furthest, step)
    return count


def pause_before_launch(losses: int) -> float:
    """Seconds before the launch that follows so many losses without progress: none after the first, then doubling."""
    return 0.0 if losses <= 1 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(losses - 2, 30))


def failure_reason(state: RunState, job: JobStatus) -> str:
    """The failure reason (one of errors.REASONS) of a run whose recoveries are used up."""
    if job.out_of_memory:
        return "out_of_memory"
    return "setup_failed" if state in (RunState.STARTING, RunState.RECOVERING) else "lost_heartbeat"
