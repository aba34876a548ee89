"""Stacks of a process that hangs, by a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gxpo_trainer.runtime import ray_session as module
from gxpo_trainer.runtime.ray_session import TracedProcess, print_stacks, stacks

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


@pytest.fixture
def hung() -> Iterator[SimpleNamespace]:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    pid, descriptor = map(int, process.stdout.readline().split())
    yield SimpleNamespace(process=process, pid=pid, descriptor=descriptor)
    process.kill()
    process.wait()


def test_they_name_the_function_that_does_not_return_each_time_they_are_asked_for(hung: SimpleNamespace) -> None:
    for _ in range(2):
        text = stacks(hung.pid, hung.descriptor)
        assert text.count("in wait_for_a_peer") == 1
    assert hung.process.poll() is None, "it goes on"


def test_a_stopped_process_has_none(hung: SimpleNamespace) -> None:
    os.kill(hung.pid, signal.SIGSTOP)
    assert "it is stopped" in stacks(hung.pid, hung.descriptor)


def test_a_process_that_was_never_asked_to_trace_is_not_signalled(hung: SimpleNamespace) -> None:
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as other:
        assert stacks(other.pid, 0) == "the process has ended"
        assert other.poll() is None
        other.kill()
    assert "has ended" in stacks(other.pid, 0)


def test_they_are_printed_for_the_log(
    hung: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "this_node", lambda: "node")
    print_stacks("verifier", TracedProcess("node", hung.pid, hung.descriptor))
    print_stacks("sampler 1", None)
    log = capsys.readouterr().err
    assert log.startswith("the stacks of the verifier follow\n")
    assert "in wait_for_a_peer" in log
    assert log.endswith("the stacks of the sampler 1 follow\nit hangs before it could be traced\n")
