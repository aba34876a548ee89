"""Which queued runs may start now: quotas, priorities, and fairness among submitters. Pure.

Order: priority, then the submitter with the fewest executing runs, then the longest wait. A run that waits for CPUs or
GPUs blocks the runs behind it, otherwise smaller runs would starve it. A run held back by its submitter's own limit
blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


def misfit(run: Candidate, limits: Limits) -> str | None:
    """Reason why a run could never start, even alone; None if it could."""
    gpus = run.gpus_of(limits.gpus)
    for what, asked, there in (("CPUs", run.cpus, limits.cpus), ("GPUs", gpus, limits.gpus)):
        if asked > there + _ROUNDING:
            return (
                f"the run needs {asked:g} {what}, but only {there:g} are available; lower placement.* "
                f"(CPUs may be fractions), add workers, or raise the service's quota"
            )
    return None


def admit(waiting: Sequence[Candidate], executing: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """The runs to start now, in order; runs that can never fit are skipped."""
    busy = Counter(run.submitter for run in executing)
    cpus = limits.cpus - sum(run.cpus for run in executing)
    gpus = limits.gpus - sum(run.gpus_of(limits.gpus) for run in executing)
    free = limits.runs - len(executing)
    left = [run for run in waiting if misfit(run, limits) is None]
    chosen: list[Candidate] = []
    while free > len(chosen):
        allowed = [run for run in left if limits.runs_per_user is None or busy[run.submitter] < limits.runs_per_user]
        if not allowed:
            break
        first = min(allowed, key=lambda run: (-run.priority, busy[run.submitter], run.queued_at, run.number))
        held = first.gpus_of(limits.gpus)
        if first.cpus > cpus + _ROUNDING or held > gpus + _ROUNDING:
            break
        chosen.append(first)
        left.remove(first)
        busy[first.submitter] += 1
        cpus -= first.cpus
        gpus -= held
    return chosen
