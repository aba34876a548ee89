"""How long a queued run has been too large for the cluster."""

from __future__ import annotations

from dataclasses import replace

from gxpo_services.scheduling.leases import MISFIT_S, Candidate, Limits, Misfits

LIMITS = Limits(runs=10, cpus=2.0, gpus=0.0)
LARGE = Candidate(1, "a", cpus=3.0, gpus=0.0, queued_at=5.0)


def test_a_run_is_late_after_being_too_large_without_a_break() -> None:
    misfits = Misfits()
    assert misfits.too_late([LARGE], LIMITS, 10.0) == {}
    assert misfits.too_late([LARGE], LIMITS, 9.0 + MISFIT_S) == {}
    assert list(misfits.too_late([LARGE], LIMITS, 10.0 + MISFIT_S)) == [1]
    assert misfits.too_late([LARGE], replace(LIMITS, cpus=3.0), 11.0 + MISFIT_S) == {}
    assert misfits.too_late([LARGE], LIMITS, 12.0 + MISFIT_S) == {}
    misfits.reset()
    assert misfits.too_late([LARGE], LIMITS, 12.0 + 2 * MISFIT_S) == {}


def test_the_next_run_of_the_same_number_begins_anew() -> None:
    misfits = Misfits()
    misfits.too_late([LARGE], LIMITS, 10.0)
    assert misfits.too_late([replace(LARGE, queued_at=6.0)], LIMITS, 10.0 + MISFIT_S) == {}
