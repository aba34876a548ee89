"""Which queued runs start: quotas, priorities, fairness, and no starvation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gxpo_services.scheduling.admission import (
    OVERSIZED_S,
    Candidate,
    Limits,
    OversizedRuns,
    admit,
    oversize_reason,
)

WIDE = Limits(runs=100, cpus=1000.0, gpus=1000.0)


def queued(number: int, submitter: str = "a", **values: float) -> Candidate:
    return Candidate(number, submitter, **{"cpus": 1.0, "gpus": 0.0, "queued_at": float(number), **values})


def numbers(runs: list[Candidate]) -> list[int]:
    return [run.number for run in runs]


def test_priority_comes_before_waiting_time() -> None:
    waiting = [queued(1), queued(2, priority=5), queued(3, priority=-1), queued(4, priority=5)]
    assert numbers(admit(waiting, [], WIDE)) == [2, 4, 1, 3]


def test_the_submitter_with_the_fewest_runs_comes_first() -> None:
    # a has two runs executing, b one, c none: c, then b and c are level and b has waited longer, ...
    executing = [queued(90, "a"), queued(91, "a"), queued(92, "b")]
    waiting = [queued(1, "a"), queued(2, "a"), queued(3, "b"), queued(4, "c"), queued(5, "c")]
    assert numbers(admit(waiting, executing, WIDE)) == [4, 3, 5, 1, 2]


def test_at_most_so_many_run_at_once() -> None:
    limits = Limits(runs=3, cpus=1000.0, gpus=0.0)
    assert numbers(admit([queued(n) for n in range(1, 9)], [queued(90)], limits)) == [1, 2]
    assert admit([queued(1)], [queued(90), queued(91), queued(92), queued(93)], limits) == []


def test_a_submitter_at_the_limit_holds_up_nobody_else() -> None:
    limits = Limits(runs=100, cpus=1000.0, gpus=0.0, runs_per_user=2)
    waiting = [queued(1, "a", priority=9), queued(2, "a", priority=9), queued(3, "b")]
    assert numbers(admit(waiting, [queued(90, "a")], limits)) == [1, 3]


def test_smaller_runs_do_not_go_past_one_that_waits_for_processors() -> None:
    limits = Limits(runs=100, cpus=4.0, gpus=0.0)
    waiting = [queued(1, cpus=3.0), queued(2, cpus=1.0)]
    assert admit(waiting, [queued(90, cpus=2.0)], limits) == []
    assert numbers(admit(waiting, [queued(90, cpus=1.0)], limits)) == [1]
    assert numbers(admit(waiting, [], limits)) == [1, 2]


def test_a_run_that_can_never_fit_blocks_nobody_and_is_told_why() -> None:
    limits = Limits(runs=100, cpus=2.0, gpus=1.0)
    assert numbers(admit([queued(1, cpus=2.5), queued(2, gpus=2.0), queued(3)], [], limits)) == [3]
    assert "2.5 CPUs" in (oversize_reason(queued(1, cpus=2.5), limits) or "")
    assert "2 GPUs" in (oversize_reason(queued(2, gpus=2.0), limits) or "")
    assert oversize_reason(queued(3, cpus=2.0, gpus=1.0), limits) is None


def test_fractions_of_a_processor_add_up_to_it() -> None:
    limits = Limits(runs=100, cpus=1.0, gpus=0.0)
    assert numbers(admit([queued(n, cpus=0.1) for n in range(1, 12)], [], limits)) == list(range(1, 11))


runs = st.builds(
    Candidate,
    number=st.integers(1, 10**6),
    submitter=st.sampled_from("abc"),
    cpus=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    gpus=st.sampled_from([0.0, 1.0]),
    priority=st.integers(-2, 2),
    queued_at=st.floats(0, 100),
)
unique = st.lists(runs, max_size=12, unique_by=lambda run: run.number)
limits = st.builds(
    Limits,
    runs=st.integers(1, 6),
    cpus=st.sampled_from([1.0, 2.0, 6.0]),
    gpus=st.sampled_from([0.0, 2.0]),
    runs_per_user=st.none() | st.integers(1, 3),
)


@given(unique, unique, limits)
def test_no_quota_is_ever_exceeded_by_what_is_admitted(
    waiting: list[Candidate], executing: list[Candidate], bounds: Limits
) -> None:
    chosen = admit(waiting, executing, bounds)
    assert len(set(numbers(chosen))) == len(chosen)
    if not chosen:
        return
    together = [*executing, *chosen]
    assert len(together) <= bounds.runs
    assert sum(run.cpus for run in together) <= bounds.cpus + 1e-6
    assert sum(run.gpus for run in together) <= bounds.gpus + 1e-6
    for name in {run.submitter for run in chosen} if bounds.runs_per_user else ():
        assert sum(run.submitter == name for run in together) <= bounds.runs_per_user


@given(unique, limits)
def test_on_an_idle_cluster_something_starts_when_anything_fits(waiting: list[Candidate], bounds: Limits) -> None:
    assert bool(admit(waiting, [], bounds)) == any(oversize_reason(run, bounds) is None for run in waiting)


def test_a_run_of_any_device_counts_its_gpus_in_a_cluster_that_has_some() -> None:
    runs = [queued(number, gpus=2.0, needs_gpus=False) for number in (1, 2)]
    two = Limits(runs=100, cpus=1000.0, gpus=2.0)
    assert numbers(admit(runs, [], two)) == [1], "both on two GPUs would wait for each other"
    assert numbers(admit(runs[1:], runs[:1], two)) == []
    none = Limits(runs=100, cpus=1000.0, gpus=0.0)
    assert numbers(admit(runs, [], none)) == [1, 2], "on CPUs"
    assert oversize_reason(runs[0], none) is None
    assert oversize_reason(queued(3, gpus=2.0), none) is not None


TWO_CPUS = Limits(runs=10, cpus=2.0, gpus=0.0)
LARGE = Candidate(1, "a", cpus=3.0, gpus=0.0, queued_at=5.0)


def test_a_run_is_overdue_after_being_too_large_without_a_break() -> None:
    oversized = OversizedRuns()
    assert oversized.overdue([LARGE], TWO_CPUS, 10.0) == {}
    assert oversized.overdue([LARGE], TWO_CPUS, 9.0 + OVERSIZED_S) == {}
    assert list(oversized.overdue([LARGE], TWO_CPUS, 10.0 + OVERSIZED_S)) == [1]
    assert oversized.overdue([LARGE], replace(TWO_CPUS, cpus=3.0), 11.0 + OVERSIZED_S) == {}
    assert oversized.overdue([LARGE], TWO_CPUS, 12.0 + OVERSIZED_S) == {}
    oversized.clear()
    assert oversized.overdue([LARGE], TWO_CPUS, 12.0 + 2 * OVERSIZED_S) == {}


def test_the_next_run_of_the_same_number_begins_anew() -> None:
    oversized = OversizedRuns()
    oversized.overdue([LARGE], TWO_CPUS, 10.0)
    assert oversized.overdue([replace(LARGE, queued_at=6.0)], TWO_CPUS, 10.0 + OVERSIZED_S) == {}
