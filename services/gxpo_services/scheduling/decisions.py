"""Decisions of the scheduler: which queued runs may start now, and what happens next to an executing one. Pure.

Order of queued runs: priority, then the submitter with the fewest executing runs, then the longest wait. A run that
waits for CPUs or GPUs blocks the runs behind it, otherwise smaller runs would starve it. A run held back by its
submitter's own limit blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gxpo_services.run_states import RunState
from gxpo_services.scheduling.launcher import JobStatus
from gxpo_services.settings import ServiceSettings

OVERSIZED_S = 60.0
"""Time that a run larger than the cluster waits for the cluster to grow: a starting one has few CPUs at first."""
_ROUNDING = 1e-9
"""Logical CPUs are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued or executing run; `priority` and `queued_at` matter only while it is queued.

    needs_gpus: whether it cannot run without `gpus`; otherwise it takes CPUs in a cluster that has none. auto_cpus:
    whether it takes fewer than `cpus` in a cluster that has fewer.
    """

    number: int
    submitter: str
    cpus: float
    gpus: float
    priority: int
    queued_at: float
    needs_gpus: bool
    auto_cpus: bool

    def cpus_of(self, cluster: float) -> float:
        """CPUs that it holds in a cluster with so many."""
        return min(self.cpus, cluster) if self.auto_cpus and cluster > 0 else self.cpus

    def gpus_of(self, cluster: float) -> float:
        """GPUs that it holds in a cluster with so many."""
        return self.gpus if self.needs_gpus or cluster > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bounds of all executing runs together. runs_per_user: per submitter; None: no limit."""

    runs: int
    cpus: float
    gpus: float
    runs_per_user: int | None = None


def oversize_reason(run: Candidate, quotas: Quotas) -> str | None:
    """Reason why a run could never start, even alone; None if it could."""
    gpus = run.gpus_of(quotas.gpus)
    for resource, needed, available in (("CPUs", run.cpus_of(quotas.cpus), quotas.cpus), ("GPUs", gpus, quotas.gpus)):
        if needed > available + _ROUNDING:
            return (
                f"the run needs {needed:g} {resource}, but only {available:g} are available; lower placement.* "
                f"(CPUs may be fractions), add workers, or raise the service's quota"
            )
    return None


def admit(waiting: Sequence[Candidate], executing: Sequence[Candidate], quotas: Quotas) -> list[Candidate]:
    """The runs to start now, in order; runs that can never fit are skipped."""
    num_executing = Counter(run.submitter for run in executing)
    free_cpus = quotas.cpus - sum(run.cpus_of(quotas.cpus) for run in executing)
    free_gpus = quotas.gpus - sum(run.gpus_of(quotas.gpus) for run in executing)
    remaining = [run for run in waiting if oversize_reason(run, quotas) is None]
    admitted: list[Candidate] = []
    while quotas.runs - len(executing) > len(admitted):
        per_user = quotas.runs_per_user
        allowed = [run for run in remaining if per_user is None or num_executing[run.submitter] < per_user]
        if not allowed:
            break
        first = min(allowed, key=lambda run: (-run.priority, num_executing[run.submitter], run.queued_at, run.number))
        cpus, gpus = first.cpus_of(quotas.cpus), first.gpus_of(quotas.gpus)
        if cpus > free_cpus + _ROUNDING or gpus > free_gpus + _ROUNDING:
            break
        admitted.append(first)
        remaining.remove(first)
        num_executing[first.submitter] += 1
        free_cpus -= cpus
        free_gpus -= gpus
    return admitted


class OversizedRuns:
    """Since when each queued run is known to be larger than the cluster."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def clear(self) -> None:
        """Call in a round that does not see the cluster: only observed time counts."""
        self._since = {}

    def overdue(self, waiting: Sequence[Candidate], quotas: Quotas, now: float) -> dict[int, str]:
        """Number → reason of the runs that have been too large for OVERSIZED_S. waiting: all queued runs."""
        reasons = {run.number: reason for run in waiting if (reason := oversize_reason(run, quotas)) is not None}
        self._since = {number: self._since.get(number, now) for number in reasons}
        return {number: reasons[number] for number, since in self._since.items() if now - since >= OVERSIZED_S}


Action = Literal["wait", "submit", "stop", "finish"]
"""submit: start the job of the current launch. stop: stop the job. finish: the launch is over, conclude it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0


def next_action(
    state: RunState,
    job: JobStatus,
    timeouts: ServiceSettings,
    *,
    launch_age_s: float,
    silence_s: float,
    request_age_s: float,
) -> tuple[Action, str]:
    """The next action and its reason. Ages are since the launch was recorded, the last heartbeat or API outage, and the
    pause or cancel request."""
    begins = state in (RunState.STARTING, RunState.RECOVERING)
    if begins and job.state == "unknown" and launch_age_s <= timeouts.start_s:
        return "submit", "the launch has no job yet"
    if job.state == "unknown":
        return "finish", "the launcher no longer knows its job"
    if not job.is_alive:
        return "finish", f"its job has {'ended' if job.state == 'succeeded' else job.state}, without an outcome"
    if begins:
        return _stop_after(silence_s, timeouts.start_s, "its trainer sent no heartbeat within start_s")
    if state is RunState.CANCELLING:
        return _stop_after(request_age_s, timeouts.cancel_grace_s, "it did not stop within cancel_grace_s")
    if state is RunState.PAUSING and request_age_s > timeouts.pause_grace_s:
        return "stop", f"it did not pause within pause_grace_s = {timeouts.pause_grace_s:g} s"
    return _stop_after(silence_s, timeouts.heartbeat_s, "its trainer sent no heartbeat for longer than heartbeat_s")


def _stop_after(age_s: float, limit_s: float, why: str) -> tuple[Action, str]:
    return ("stop", f"{why} = {limit_s:g} s") if age_s > limit_s else ("wait", "")


def losses_without_progress(steps: Iterable[int]) -> int:
    """Number of consecutive losses since the run last made progress. steps: of the run at each loss, in order."""
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
