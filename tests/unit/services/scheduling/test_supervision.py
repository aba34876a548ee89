"""The scheduler's next action for a run, from its state, its job and the clock."""

from __future__ import annotations

import pytest

from gxpo_services.run_states import EXECUTING, RunState
from gxpo_services.scheduling.launcher import JobStatus
from gxpo_services.scheduling.supervision import (
    Limits,
    failure_reason,
    losses_without_progress,
    next_action,
    pause_before_launch,
)

LIMITS = Limits(start_s=900, heartbeat_s=120, cancel_grace_s=60, pause_grace_s=300)
S = RunState


def action(state: RunState, job: str, *, launch: float = 0, silence: float = 0, request: float = 0) -> str:
    found, why = next_action(
        state, JobStatus(job), launch_age_s=launch, silence_s=silence, request_age_s=request, limits=LIMITS
    )
    assert bool(why) == (found != "wait"), "every action has a reason"
    return found


@pytest.mark.parametrize("job", ["succeeded", "failed", "stopped"])
@pytest.mark.parametrize("state", sorted(EXECUTING))
def test_the_end_of_a_job_ends_its_launch(state: RunState, job: str) -> None:
    assert action(state, job) == "finish"


@pytest.mark.parametrize("state", [S.STARTING, S.RECOVERING])
def test_a_launch_without_a_job_gets_one_until_its_time_is_over(state: RunState) -> None:
    assert action(state, "unknown", launch=899) == "submit"
    assert action(state, "unknown", launch=901) == "finish"


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSING, S.CANCELLING])
def test_a_job_that_is_forgotten_ends_its_launch(state: RunState) -> None:
    assert action(state, "unknown") == "finish"


@pytest.mark.parametrize("job", ["pending", "running"])
def test_each_state_has_its_own_time_out(job: str) -> None:
    for state in (S.STARTING, S.RECOVERING):
        assert action(state, job, silence=899, request=9999) == "wait"
        assert action(state, job, silence=901) == "stop"
    assert action(S.RUNNING, job, silence=119, launch=9999, request=9999) == "wait"
    assert action(S.RUNNING, job, silence=121) == "stop"
    assert action(S.CANCELLING, job, request=59, silence=9999) == "wait"
    assert action(S.CANCELLING, job, request=61) == "stop"
    assert action(S.PAUSING, job, request=299, silence=119) == "wait"
    assert action(S.PAUSING, job, request=301) == "stop"
    assert action(S.PAUSING, job, request=0, silence=121) == "stop"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("unknown", "the launcher no longer knows its job"),
        ("succeeded", "its job has ended, without an outcome"),
        ("failed", "its job has failed, without an outcome"),
        ("stopped", "its job has stopped, without an outcome"),
    ],
)
def test_the_reason_names_how_the_job_ended(job: str, why: str) -> None:
    found = next_action(S.RUNNING, JobStatus(job), launch_age_s=0, silence_s=0, request_age_s=0, limits=LIMITS)
    assert found == ("finish", why)


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


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([], 0),
        ([0], 1),
        ([0, 0, 0], 3),
        ([7], 1),
        ([7, 7, 7], 3),
        # A run that repeats steps from its checkpoint has not come further.
        ([7, 5, 6, 7], 4),
        ([7, 5, 8], 1),
        ([3, 3, 4, 4], 2),
    ],
)
def test_only_losses_since_the_last_new_step_count(steps: list[int], lost: int) -> None:
    assert losses_without_progress(steps) == lost


def test_the_pause_before_a_launch_doubles_with_each_loss_without_progress() -> None:
    assert [pause_before_launch(losses) for losses in (0, 1, 2, 3, 4, 7, 8, 2000)] == [0, 0, 5, 10, 20, 160, 300, 300]
