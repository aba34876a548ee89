"""Queued runs that are larger than the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from gxpo_services.scheduling import admission

MISFIT_S = 60.0
"""Time that a run larger than the cluster waits for the cluster to grow: a starting one has few CPUs at first."""


class Misfits:
    """Since when each queued run is known to be larger than the cluster."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, float], float] = {}  # by queued_at too: SQLite reuses numbers

    def reset(self) -> None:
        """Call in a round that does not see the cluster: only observed time counts."""
        self._since.clear()

    def too_late(self, waiting: Sequence[admission.Candidate], limits: admission.Limits, now: float) -> dict[int, str]:
        """Number → reason of the runs that have been too large for MISFIT_S. waiting: all queued runs."""
        reasons = {run: why for run in waiting if (why := admission.misfit(run, limits)) is not None}
        keys = {run: (run.number, run.queued_at) for run in reasons}
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        return {run.number: reasons[run] for run, key in keys.items() if now - self._since[key] >= MISFIT_S}
