"""Time without progress, its limit in each phase, and the watchdog of the main thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from gxpo_trainer.config import TimeoutsConfig
from gxpo_trainer.errors import Interrupted, Stalled, TrainingError
from gxpo_trainer.runtime import ray_session as module
from gxpo_trainer.runtime.placement_group import RunPlacementGroup
from gxpo_trainer.runtime.progress import ProgressWatch, Watchdog
from gxpo_trainer.runtime.ray_session import TracedProcess, end_stalled, stacks


def watch(**limits: float) -> tuple[ProgressWatch, SimpleNamespace]:
    """A watch, and the clock that it reads: `now`."""
    clock = SimpleNamespace(now=1000.0)
    return ProgressWatch(TimeoutsConfig(**limits), lambda: clock.now), clock


def test_a_phase_stalls_after_its_own_limit_and_the_message_names_it() -> None:
    watched, clock = watch(sampling_s=60.0, updating_s=10.0)
    watched.begin("sampling")
    clock.now += 59.0
    watched.check()
    assert watched.remaining_s == 1.0
    clock.now += 1.0
    with pytest.raises(Stalled, match=r"no progress for 60 s while sampling \(timeouts.sampling_s = 60\)") as error:
        watched.check()
    assert error.value.reason == "stalled"
    watched.begin("updating")
    clock.now += 11.0
    with pytest.raises(Stalled, match=r"11 s while updating \(timeouts.updating_s = 10\)"):
        watched.check()


def test_every_answer_is_progress_and_a_wait_for_a_lost_node_is_not_counted() -> None:
    watched, clock = watch(sampling_s=60.0)
    watched.begin("sampling")
    for _ in range(5):
        clock.now += 50.0
        watched.check()
        watched.progressed()
    clock.now += 500.0
    begin = watched.working_s
    watched.exclude(450.0)
    assert watched.idle_s == 50.0
    assert watched.working_s == begin - 450.0, "nor is it training time"
    watched.check()


def test_a_wait_for_an_environment_is_excluded_as_far_as_nothing_progressed() -> None:
    watched, clock = watch(sampling_s=600.0)
    watched.begin("sampling")
    begin = watched.working_s
    clock.now += 60.0
    watched.progressed()  # of a sequence that needs no environment
    clock.now += 20.0
    watched.exclude_wait(70.0)
    assert (watched.working_s - begin, watched.idle_s) == (60.0, 0.0)
    watched.learning = True
    clock.now += 30.0
    watched.exclude_wait(30.0)
    assert watched.working_s - begin == 90.0, "the learner worked meanwhile"
    watched.learning = False
    with watched.excluded():
        clock.now += 20.0
        watched.exclude_wait(50.0)
    assert (watched.working_s - begin, watched.idle_s) == (60.0, 0.0), "not taken back"


def test_a_pause_of_the_process_is_excluded_whichever_thread_wakes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, clock = watch(sampling_s=15.0)
    monkeypatch.setattr("gxpo_trainer.runtime.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    watched.poll(1.0)
    watched.begin("sampling")
    begin = watched.working_s
    clock.now += 20.5
    watched.check()
    assert watched.working_s - begin == 1.0, "the next poll was due then"
    watched.poll(1.0)
    clock.now += 5.0
    assert (watched.working_s - begin, watched.idle_s) == (6.0, 6.0)
    watched.poll(None)
    clock.now += 100.0
    assert watched.idle_s == 106.0, "nobody polls: the time may have passed in one call"


def test_the_watchdog_reports_a_main_thread_that_hangs_once_and_shows_it_before() -> None:
    watched, clock = watch(setup_s=100.0)
    stalls: list[Stalled] = []
    reported: list[int] = []
    stalled, noticed, back = threading.Event(), threading.Event(), threading.Event()

    def on_stall(error: Stalled) -> None:
        stalls.append(error)
        stalled.set()

    def show_idle(minutes: int, limit_s: float) -> None:
        assert limit_s == 100.0
        reported.append(minutes)
        (noticed if minutes else back).set()

    with Watchdog(watched, on_stall, show_idle, grace_s=30.0, poll_s=0.005):
        clock.now += 120.0
        assert noticed.wait(30)
        watched.progressed()
        assert back.wait(30)
        assert not stalls, "waits for actors have the grace time to notice a stall themselves"
        clock.now += 131.0
        assert stalled.wait(30)
    assert reported[:2] == [2, 0]
    assert [str(error) for error in stalls] == ["no progress for 131 s while setting up (timeouts.setup_s = 100)"]


def test_a_wait_for_a_process_to_start_is_no_working_time() -> None:
    watched, clock = watch(setup_s=60.0, sampling_s=60.0)
    begin, running = watched.working_s, watched.running_s
    watched.begin("sampling")
    clock.now += 7.0
    watched.begin("setup")
    clock.now += 40.0
    watched.progressed()
    watched.begin("sampling")
    clock.now += 3.0
    watched.progressed()
    watched.begin("setup")
    clock.now += 60.0
    with pytest.raises(Stalled, match=r"setup_s = 60"):
        watched.check()
    assert watched.working_s - begin == 10.0
    assert watched.running_s - running == 50.0  # a start that stalled is in neither
    begin = watched.working_s
    with watched.excluded():
        clock.now += 4.0
        watched.begin("setup")
        clock.now += 20.0
        watched.progressed()
    assert (watched.working_s - begin, watched.idle_s) == (0.0, 0.0), "excluded once"


def test_an_interrupt_ends_the_waits_that_leave_the_learner_as_it_is() -> None:
    terminated = [False]
    watched = ProgressWatch(interrupted=lambda: terminated[0])
    with watched.abandonable():
        watched.begin("sampling")
        terminated[0] = True
        with pytest.raises(Interrupted):
            watched.check()
        for phase in ("updating", "syncing", "checkpointing"):
            watched.begin(phase)
            watched.check()
        with pytest.raises(Interrupted):
            watched.begin("setup")
    watched.begin("sampling")  # asynchronous sampling while the learner updates
    watched.check()


def test_a_long_wait_for_a_lost_node_is_no_stall_and_can_be_interrupted() -> None:
    clock, terminated, idle = SimpleNamespace(now=0.0), [False], list[float]()
    limits = TimeoutsConfig(sampling_s=60.0)
    watched = ProgressWatch(limits, lambda: clock.now, interrupted=lambda: terminated[0])

    def wait(timeout_seconds: int) -> bool:
        clock.now += timeout_seconds
        idle.append(watched.idle_s)  # what the watchdog sees
        return False

    group = RunPlacementGroup(SimpleNamespace(wait=wait), wait_s=3605.0, watch=watched)
    watched.begin("sampling")
    with pytest.raises(TrainingError, match=r"within 3605 s \(placement\.wait_s\)"):
        group._await_rescheduling()
    assert (clock.now, max(idle), watched.idle_s) == (3605.0, 10.0, 0.0)
    terminated[0] = True
    with watched.abandonable(), pytest.raises(Interrupted):
        group._await_rescheduling()
    assert clock.now == 3615.0


# Stacks of a process that hangs, by a real one.


HANGS = """
import threading
import gxpo_trainer.runtime.ray_session as stacks

stacks.this_node = lambda: "node"
traced = stacks.trace_this_process()

def wait_for_a_peer():
    print(traced.pid, traced.descriptor, flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

wait_for_a_peer()
"""


def test_stacks_name_the_function_that_does_not_return_and_are_printed_for_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "this_node", lambda: "node")
    there: list[TracedProcess] = []
    monkeypatch.setattr(module, "_kill_there", there.append)
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as hung:
        pid, descriptor = map(int, hung.stdout.readline().split())
        assert stacks(pid, descriptor).count("in wait_for_a_peer") == 1
        assert hung.poll() is None, "it goes on"
        traced = TracedProcess("node", pid, descriptor)
        elsewhere = TracedProcess("another node", 7, 3)
        end_stalled({"verifier": (None, traced), "sampler 2": (None, elsewhere)})
        assert hung.wait(60) == -signal.SIGKILL
    assert there == [elsewhere]
    log = capsys.readouterr().err
    assert log.startswith("the stacks of the verifier follow\n")
    assert log.count("in wait_for_a_peer") == 1, "those of this time alone"
    assert log.endswith("it is process 7 of another node (another ), where `py-spy dump` reads them\n")


def test_a_stopped_process_is_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "this_node", lambda: "node")
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as hung:
        pid, descriptor = map(int, hung.stdout.readline().split())
        os.kill(pid, signal.SIGSTOP)
        end_stalled({"verifier": (None, TracedProcess("node", pid, descriptor))})
        assert hung.wait(60) == -signal.SIGKILL
    assert "it is stopped" in capsys.readouterr().err


def test_a_process_that_was_never_asked_to_trace_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_node", lambda: "node")
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as other:
        assert stacks(other.pid, 0) == "the process has ended"
        for descriptor in (0, None):
            end_stalled({"verifier": (None, TracedProcess("node", other.pid, descriptor))})
        assert other.poll() is None
        other.kill()
    assert "has ended" in stacks(other.pid, 0)
