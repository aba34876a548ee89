"""What is done about a run, from its state, its job and the clock."""

from __future__ import annotations

import pytest

from gxpo_services.run_states import EXECUTING, RunState
from gxpo_services.scheduling.launcher import JobStatus
from gxpo_services.scheduling.supervision import Limits, failure_reason, lost_in_vain, next_deed

LIMITS = Limits(start_s=900, heartbeat_s=120, cancel_grace_s=60, pause_grace_s=300)
S = RunState


def deed(state: RunState, job: str, *, launch: float = 0, silence: float = 0, wish: float = 0) -> str:
    found, why = next_deed(
        state, JobStatus(job), launch_age_s=launch, silence_s=silence, wish_age_s=wish, limits=LIMITS
    )
    assert bool(why) == (found != "wait"), "every deed has a reason"
    return found


@pytest.mark.parametrize("job", ["succeeded", "failed", "stopped"])
@pytest.mark.parametrize("state", sorted(EXECUTING))
def test_the_end_of_a_job_ends_its_launch(state: RunState, job: str) -> None:
    assert deed(state, job) == "finish"


@pytest.mark.parametrize("state", [S.STARTING, S.RECOVERING])
def test_a_launch_without_a_job_gets_one_until_its_time_is_over(state: RunState) -> None:
    assert deed(state, "unknown", launch=899) == "submit"
    assert deed(state, "unknown", launch=901) == "finish"


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSING, S.CANCELLING])
def test_a_job_that_is_forgotten_ends_its_launch(state: RunState) -> None:
    assert deed(state, "unknown") == "finish"


@pytest.mark.parametrize("job", ["pending", "running"])
def test_each_state_has_its_own_patience(job: str) -> None:
    for state in (S.STARTING, S.RECOVERING):
        assert deed(state, job, silence=899, wish=9999) == "wait"
        assert deed(state, job, silence=901) == "stop"
    assert deed(S.RUNNING, job, silence=119, launch=9999, wish=9999) == "wait"
    assert deed(S.RUNNING, job, silence=121) == "stop"
    assert deed(S.CANCELLING, job, wish=59, silence=9999) == "wait"
    assert deed(S.CANCELLING, job, wish=61) == "stop"
    assert deed(S.PAUSING, job, wish=299, silence=119) == "wait"
    assert deed(S.PAUSING, job, wish=301) == "stop"
    assert deed(S.PAUSING, job, wish=0, silence=121) == "stop"


def test_the_reason_of_a_failure_names_the_culprit() -> None:
    assert failure_reason(S.RUNNING, JobStatus("failed", "exit code 137")) == "lost_heartbeat"
    assert failure_reason(S.STARTING, JobStatus("failed", "exit code 1")) == "setup_failed"
    for message in ("ray.exceptions.OutOfMemoryError: Task was killed", "killed: out of memory"):
        assert failure_reason(S.RUNNING, JobStatus("failed", message)) == "out_of_memory"
    assert failure_reason(S.RUNNING, JobStatus("succeeded", "out of memory")) == "lost_heartbeat"


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([], 0),
        ([0], 1),
        ([0, 0, 0], 3),
        ([7], 0),
        ([7, 7, 7], 2),
        # A run that repeats steps from its checkpoint has not come further.
        ([7, 5, 6, 7], 3),
        ([7, 5, 8], 0),
        ([3, 3, 4, 4], 1),
    ],
)
def test_only_losses_since_the_last_new_step_count(steps: list[int], lost: int) -> None:
    assert lost_in_vain(steps) == lost
