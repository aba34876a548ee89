"""Which queued runs start (quotas, priorities, fairness, no starvation), and the next action for an executing one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from gxpo_services.run_states import EXECUTING, RunState
from gxpo_services.scheduling.decisions import (
    Candidate,
    OversizedRuns,
    Quotas,
    admit,
    failure_reason,
    losses_without_progress,
    next_action,
    oversize_reason,
    pause_before_launch,
)
from gxpo_services.scheduling.launcher import JobStatus
from gxpo_services.settings import ServiceSettings

WIDE = Quotas(runs=100, cpus=1000.0, gpus=1000.0)


def queued(number: int, submitter: str = "a", **values: float) -> Candidate:
    usual = {"cpus": 1.0, "gpus": 0.0, "priority": 0, "needs_gpus": True, "auto_cpus": False}
    return Candidate(number, submitter, **(usual | {"queued_at": float(number)} | values))  # type: ignore[arg-type]


def admitted(waiting: list[Candidate], executing: list[Candidate], quotas: Quotas) -> list[int]:
    return [run.number for run in admit(waiting, executing, quotas)]


def test_priority_comes_first_then_the_submitter_with_the_fewest_runs_then_the_longest_wait() -> None:
    runs = [queued(1), queued(2, priority=5), queued(3, priority=-1), queued(4, priority=5)]
    assert admitted(runs, [], WIDE) == [2, 4, 1, 3]
    # a has two runs executing, b one, c none: c, then b and c are level and b has waited longer, ...
    runs = [queued(number, submitter) for number, submitter in enumerate("aabcc", 1)]
    assert admitted(runs, [queued(90, "a"), queued(91, "a"), queued(92, "b")], WIDE) == [4, 3, 5, 1, 2]


def test_at_most_so_many_run_at_once_and_a_submitter_at_the_limit_holds_up_nobody_else() -> None:
    three, two_each = replace(WIDE, runs=3), replace(WIDE, runs_per_user=2)
    assert admitted([queued(n) for n in range(1, 9)], [queued(90)], three) == [1, 2]
    assert admitted([queued(1)], [queued(n) for n in range(90, 94)], three) == []
    assert admitted([queued(1, priority=9), queued(2, priority=9), queued(3, "b")], [queued(90)], two_each) == [1, 3]


def test_smaller_runs_do_not_go_past_one_that_waits_for_processors() -> None:
    runs, four = [queued(1, cpus=3.0), queued(2, cpus=1.0)], replace(WIDE, cpus=4.0)
    assert [admitted(runs, [queued(90, cpus=cpus)], four) for cpus in (2.0, 1.0)] == [[], [1]]
    assert admitted(runs, [], four) == [1, 2]
    tenths = [queued(number, cpus=0.1) for number in range(1, 12)]
    assert admitted(tenths, [], replace(WIDE, cpus=1.0)) == [*range(1, 11)], "fractions add up"


def test_a_run_that_can_never_fit_blocks_nobody_and_is_told_why() -> None:
    quotas = Quotas(runs=100, cpus=2.0, gpus=1.0)
    assert admitted([queued(1, cpus=2.5), queued(2, gpus=2.0), queued(3)], [], quotas) == [3]
    assert "2.5 CPUs" in (oversize_reason(queued(1, cpus=2.5), quotas) or "")
    assert "2 GPUs" in (oversize_reason(queued(2, gpus=2.0), quotas) or "")
    assert oversize_reason(queued(3, cpus=2.0, gpus=1.0), quotas) is None


runs = st.builds(
    Candidate,
    number=st.integers(1, 10**6),
    submitter=st.sampled_from("abc"),
    cpus=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    gpus=st.sampled_from([0.0, 1.0]),
    priority=st.integers(-2, 2),
    needs_gpus=st.just(True),
    auto_cpus=st.just(False),
    queued_at=st.floats(0, 100),
)
unique = st.lists(runs, max_size=12, unique_by=lambda run: run.number)
quotas = st.builds(
    Quotas,
    runs=st.integers(1, 6),
    cpus=st.sampled_from([1.0, 2.0, 6.0]),
    gpus=st.sampled_from([0.0, 2.0]),
    runs_per_user=st.none() | st.integers(1, 3),
)


@given(unique, unique, quotas)
def test_no_quota_is_exceeded(waiting: list[Candidate], executing: list[Candidate], bounds: Quotas) -> None:
    chosen = admit(waiting, executing, bounds)
    assert len({run.number for run in chosen}) == len(chosen)
    if not chosen:
        return
    together = [*executing, *chosen]
    assert len(together) <= bounds.runs
    assert sum(run.cpus for run in together) <= bounds.cpus + 1e-6
    assert sum(run.gpus for run in together) <= bounds.gpus + 1e-6
    for name in {run.submitter for run in chosen} if bounds.runs_per_user else ():
        assert sum(run.submitter == name for run in together) <= bounds.runs_per_user


@given(unique, quotas)
def test_on_an_idle_cluster_something_starts_when_anything_fits(waiting: list[Candidate], bounds: Quotas) -> None:
    assert bool(admit(waiting, [], bounds)) == any(oversize_reason(run, bounds) is None for run in waiting)


def test_a_run_of_any_device_counts_its_gpus_in_a_cluster_that_has_some() -> None:
    runs = [queued(number, gpus=2.0, needs_gpus=False) for number in (1, 2)]
    two = Quotas(runs=100, cpus=1000.0, gpus=2.0)
    assert admitted(runs, [], two) == [1], "both on two GPUs would wait for each other"
    assert admitted(runs[1:], runs[:1], two) == []
    none = Quotas(runs=100, cpus=1000.0, gpus=0.0)
    assert admitted(runs, [], none) == [1, 2], "on CPUs"
    assert oversize_reason(runs[0], none) is None
    assert oversize_reason(queued(3, gpus=2.0), none) is not None


TWO_CPUS = Quotas(runs=10, cpus=2.0, gpus=0.0)
LARGE = queued(1, cpus=3.0, queued_at=5.0)


def test_a_run_whose_shares_are_automatic_takes_the_cpus_that_there_are() -> None:
    auto = replace(LARGE, auto_cpus=True)
    assert oversize_reason(LARGE, TWO_CPUS) is not None
    assert oversize_reason(auto, TWO_CPUS) is None
    assert admitted([auto, queued(6)], [], TWO_CPUS) == [1], "it takes both"
    assert admitted([queued(2)], [auto], replace(TWO_CPUS, cpus=4.0)) == [2], "it holds its three of four"
    assert oversize_reason(auto, replace(TWO_CPUS, cpus=0.0)) is not None, "no worker has joined"


def test_a_run_is_overdue_after_being_too_large_without_a_break() -> None:
    oversized = OversizedRuns()
    assert oversized.overdue([LARGE], TWO_CPUS, 10.0) == {}
    assert oversized.overdue([LARGE], TWO_CPUS, 69.0) == {}
    assert list(oversized.overdue([LARGE], TWO_CPUS, 70.0)) == [1]
    assert oversized.overdue([LARGE], replace(TWO_CPUS, cpus=3.0), 71.0) == {}
    assert oversized.overdue([LARGE], TWO_CPUS, 72.0) == {}
    oversized.clear()
    assert oversized.overdue([LARGE], TWO_CPUS, 132.0) == {}
    assert list(oversized.overdue([LARGE], TWO_CPUS, 192.0)) == [1]


TIMEOUTS = ServiceSettings(start_s=900, heartbeat_s=120, cancel_grace_s=60, pause_grace_s=300)
S = RunState


def action(state: RunState, job: str, *, launch: float = 0, silence: float = 0, request: float = 0) -> str:
    chosen, why = next_action(
        state, JobStatus(job), TIMEOUTS, launch_age_s=launch, silence_s=silence, request_age_s=request
    )
    assert bool(why) == (chosen != "wait"), "every action has a reason"
    return chosen


@pytest.mark.parametrize("state", sorted(EXECUTING))
def test_the_end_of_a_job_ends_its_launch_and_one_without_a_job_gets_one_until_its_time_is_over(
    state: RunState,
) -> None:
    assert {action(state, job) for job in ("succeeded", "failed", "stopped")} == {"finish"}
    begins = state in (S.STARTING, S.RECOVERING)
    assert action(state, "unknown", launch=900) == ("submit" if begins else "finish")
    assert action(state, "unknown", launch=901) == "finish"


@pytest.mark.parametrize("job", ["pending", "running"])
def test_each_state_has_its_own_time_out(job: str) -> None:
    for state in (S.STARTING, S.RECOVERING):
        assert action(state, job, silence=900, request=9999) == "wait"
        assert action(state, job, silence=901) == "stop"
    assert action(S.RUNNING, job, silence=120, launch=9999, request=9999) == "wait"
    assert action(S.RUNNING, job, silence=121) == "stop"
    assert action(S.CANCELLING, job, request=60, silence=9999) == "wait"
    assert action(S.CANCELLING, job, request=61) == "stop"
    assert action(S.PAUSING, job, request=300, silence=120) == "wait"
    assert action(S.PAUSING, job, request=10, silence=0) == "wait"
    assert action(S.PAUSING, job, request=301) == "stop"
    assert action(S.PAUSING, job, request=0, silence=121) == "stop"


def test_the_reason_names_how_the_job_ended() -> None:
    ends = {"succeeded": "ended", "failed": "failed", "stopped": "stopped"}
    reasons = {job: f"its job has {end}, without an outcome" for job, end in ends.items()}
    for job, why in {"unknown": "the launcher no longer knows its job", **reasons}.items():
        ended = next_action(S.RUNNING, JobStatus(job), TIMEOUTS, launch_age_s=0, silence_s=0, request_age_s=0)
        assert ended == ("finish", why)


def test_the_failure_reason_names_the_cause() -> None:
    assert failure_reason(S.RUNNING, JobStatus("failed", "exit code 137")) == "lost_heartbeat"
    assert failure_reason(S.STARTING, JobStatus("failed", "exit code 1")) == "setup_failed"
    for message in ("ray.exceptions.OutOfMemoryError: Task was killed", "killed: out of memory"):
        assert failure_reason(S.RUNNING, JobStatus("failed", message)) == "out_of_memory"
    assert failure_reason(S.RUNNING, JobStatus("succeeded", "out of memory")) == "lost_heartbeat"


def test_a_report_of_lacking_memory_is_one_line_of_a_message() -> None:
    killed = "1 worker(s) were killed due to the node running low on memory. 6.58GB used / 23.54GB limit"
    job = JobStatus("failed", f"The actor died.\n{killed}\n" + "- objects spillable: 0\n" * 200)
    assert (job.out_of_memory, job.summary) == (True, killed)
    assert JobStatus("failed", "x" * 4000).summary == "x" * 1000


def test_only_losses_since_the_last_new_step_count() -> None:
    # A run that repeats steps from its checkpoint has not come further.
    histories = ([], [0], [0, 0, 0], [7], [7, 7, 7], [7, 5, 6, 7], [7, 5, 8], [3, 3, 4, 4])
    assert [losses_without_progress(steps) for steps in histories] == [0, 1, 3, 1, 3, 4, 1, 2]


def test_the_pause_before_a_launch_doubles_with_each_loss_without_progress() -> None:
    assert [pause_before_launch(losses) for losses in (0, 1, 2, 3, 4, 7, 8, 2000)] == [0, 0, 5, 10, 20, 160, 300, 300]
