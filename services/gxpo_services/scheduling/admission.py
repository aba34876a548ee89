"""Which queued runs may start now: quotas, priorities, and fairness among submitters. Pure.

The order is: higher priority first; among equals whoever has the fewest executing runs; then whoever has waited
longest. A run that lacks processors waits for them and those behind it wait too: if smaller runs went past, a large
one would never start. A run that is held back by its submitter's own limit holds up nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9
"""Logical CPUs are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that is queued, or that executes (then its priority and time mean nothing)."""

    number: int
    submitter: str
    cpus: float
    gpus: float
    priority: int = 0
    queued_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What all executing runs together may have. runs_per_user: of one submitter; None: no limit of its own."""

    runs: int
    cpus: float
    gpus: float
    runs_per_user: int | None = None


def misfit(run: Candidate, limits: Limits) -> str | None:
    """Why a run could not even start alone; None when it can."""
    for what, asked, there in (("CPUs", run.cpus, limits.cpus), ("GPUs", run.gpus, limits.gpus)):
        if asked > there + _ROUNDING:
            return (
                f"the run asks for {asked:g} {what} and runs may have {there:g}; lower placement.* "
                f"(CPUs may be fractions), add workers, or raise the service's quota"
            )
    return None


def admit(waiting: Sequence[Candidate], executing: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """The runs that start now, in order; those that can never fit are passed over."""
    busy = Counter(run.submitter for run in executing)
    cpus = limits.cpus - sum(run.cpus for run in executing)
    gpus = limits.gpus - sum(run.gpus for run in executing)
    free = limits.runs - len(executing)
    left = [run for run in waiting if misfit(run, limits) is None]
    chosen: list[Candidate] = []
    while free > len(chosen):
        allowed = [run for run in left if limits.runs_per_user is None or busy[run.submitter] < limits.runs_per_user]
        if not allowed:
            break
        first = min(allowed, key=lambda run: (-run.priority, busy[run.submitter], run.queued_at, run.number))
        if first.cpus > cpus + _ROUNDING or first.gpus > gpus + _ROUNDING:
            break
        chosen.append(first)
        left.remove(first)
        busy[first.submitter] += 1
        cpus -= first.cpus
        gpus -= first.gpus
    return chosen
