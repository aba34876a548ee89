"""Which queued runs may start now: quotas, priorities, and fairness among submitters. Pure.

Order: priority, then the submitter with the fewest executing runs, then the longest wait. A run that waits for CPUs or
GPUs blocks the runs behind it, otherwise smaller runs would starve it. A run held back by its submitter's own limit
blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OVERSIZED_S = 60.0
"""Time that a run larger than the cluster waits for the cluster to grow: a starting one has few CPUs at first."""
_ROUNDING = 1e-9
"""Logical CPUs are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued or executing run; `priority` and `queued_at` matter only while it is queued.

    needs_gpus: whether it cannot run without `gpus`; otherwise it takes CPUs in a cluster that has none.
    """

    number: int
    submitter: str
    cpus: float
    gpus: float
    priority: int = 0
    queued_at: float = 0.0
    needs_gpus: bool = True

    def gpus_of(self, cluster: float) -> float:
        """GPUs that it holds in a cluster with so many."""
        return self.gpus if self.needs_gpus or cluster > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas of all executing runs together. runs_per_user: per submitter; None: no limit."""

    runs: int
    cpus: float
    gpus: float
    runs_per_user: int | None = None


def oversize_reason(run: Candidate, limits: Limits) -> str | None:
    """Reason why a run could never start, even alone; None if it could."""
    gpus = run.gpus_of(limits.gpus)
    for resource, needed, available in (("CPUs", run.cpus, limits.cpus), ("GPUs", gpus, limits.gpus)):
        if needed > available + _ROUNDING:
            return (
                f"the run needs {needed:g} {resource}, but only {available:g} are available; lower placement.* "
                f"(CPUs may be fractions), add workers, or raise the service's quota"
            )
    return None


def admit(waiting: Sequence[Candidate], executing: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """The runs to start now, in order; runs that can never fit are skipped."""
    num_executing = Counter(run.submitter for run in executing)
    free_cpus = limits.cpus - sum(run.cpus for run in executing)
    free_gpus = limits.gpus - sum(run.gpus_of(limits.gpus) for run in executing)
    remaining = [run for run in waiting if oversize_reason(run, limits) is None]
    admitted: list[Candidate] = []
    while limits.runs - len(executing) > len(admitted):
        per_user = limits.runs_per_user
        allowed = [run for run in remaining if per_user is None or num_executing[run.submitter] < per_user]
        if not allowed:
            break
        first = min(allowed, key=lambda run: (-run.priority, num_executing[run.submitter], run.queued_at, run.number))
        gpus = first.gpus_of(limits.gpus)
        if first.cpus > free_cpus + _ROUNDING or gpus > free_gpus + _ROUNDING:
            break
        admitted.append(first)
        remaining.remove(first)
        num_executing[first.submitter] += 1
        free_cpus -= first.cpus
        free_gpus -= gpus
    return admitted


class OversizedRuns:
    """Since when each queued run is known to be larger than the cluster."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, float], float] = {}  # by queued_at too: SQLite reuses numbers

    def clear(self) -> None:
        """Call in a round that does not see the cluster: only observed time counts."""
        self._since = {}

    def overdue(self, waiting: Sequence[Candidate], limits: Limits, now: float) -> dict[int, str]:
        """Number → reason of the runs that have been too large for OVERSIZED_S. waiting: all queued runs."""
        reasons = {run: reason for run in waiting if (reason := oversize_reason(run, limits)) is not None}
        keys = {run: (run.number, run.queued_at) for run in reasons}
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        return {run.number: reasons[run] for run, key in keys.items() if now - self._since[key] >= OVERSIZED_S}
