"""The supervisor with real processes: restart, complete shutdown, and no effect on other processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.processes import is_alive
from support.service_processes import until

from gxpo_services.local.supervisor import Child, StartError, Stopped, Supervisor, stop_orphans
from gxpo_trainer.errors import DataError
from gxpo_trainer.runtime.locks import process_start

LONG_S = 60


IDLE = "import time; time.sleep(600)"


def python(program: str, *words: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(program), *map(str, words)]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    for name, value in {"FIRST_PAUSE_S": 0.01, "PROBE_EVERY_S": 0.0, "LARGEST_LOG": 10_000}.items():
        monkeypatch.setattr(f"gxpo_services.local.supervisor.{name}", value)
    made = Supervisor(tmp_path / "up.json", tmp_path / "logs", messages.append, threading.Event())
    yield made
    made.stop()


def pid_in(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


def test_a_failed_start_is_retried_and_a_dead_child_is_restarted_and_reported(
    supervisor: Supervisor, messages: list[str], tmp_path: Path
) -> None:
    program = """
        import os, pathlib, sys, time
        failed, mark = map(pathlib.Path, sys.argv[1:])
        if not failed.exists():
            failed.touch()
            sys.exit(1)
        mark.write_text(str(os.getpid()))
        time.sleep(600)
    """
    mark = tmp_path / "mark"
    supervisor.start(Child("api", python(program, tmp_path / "failed", mark), lambda: pid_in(mark) > 0, tries=2))
    first = pid_in(mark)
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_in(mark) not in (0, first), "the restart", supervisor.check)
    assert is_alive(pid_in(mark))
    assert not is_alive(first)
    assert messages[0] == "api: ended with code 1 during start-up; retrying"
    assert messages[1].startswith("api: ready after")
    assert messages[2:] == ["api: ended with signal 9; restarting in 0.01 s"]
    recorded = json.loads((tmp_path / "up.json").read_text())
    (process,) = recorded["processes"]
    assert (process["pid"], process["start"]) == (pid_in(mark), process_start(pid_in(mark)))


def test_a_child_that_hangs_after_its_restart_is_restarted_again(
    supervisor: Supervisor, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr("gxpo_services.local.supervisor.time", clock)
    starts, mark = tmp_path / "starts", tmp_path / "mark"
    program = """
        import os, pathlib, sys, time
        starts, mark = map(pathlib.Path, sys.argv[1:])
        earlier = starts.read_text() if starts.exists() else ""
        starts.write_text(earlier + "x")
        if len(earlier) != 1:
            mark.write_text(str(os.getpid()))
        time.sleep(600)
    """
    supervisor.start(Child("ray", python(program, starts, mark), lambda: is_alive(pid_in(mark)), start_s=LONG_S))
    first = pid_in(mark)
    os.kill(first, signal.SIGKILL)
    until(lambda: starts.read_text() == "xx", "the start that hangs", supervisor.check)
    hangs = "ray: not ready 60 s after its restart; ending it"
    assert hangs not in messages
    late_s = LONG_S
    until(lambda: pid_in(mark) not in (0, first), "the restart", supervisor.check)
    assert starts.read_text() == "xxx"
    assert hangs in messages


def test_a_child_that_stops_to_answer_is_restarted(supervisor: Supervisor, messages: list[str], tmp_path: Path) -> None:
    """Stopped as by SIGSTOP: it still accepts connections and never answers."""
    mark, beat = tmp_path / "mark", tmp_path / "beat"
    program = """
        import os, pathlib, sys, time
        mark, beat = map(pathlib.Path, sys.argv[1:])
        mark.write_text(str(os.getpid()))
        while True:
            beat.touch()
            time.sleep(0.01)
    """

    def answers() -> bool:
        beat.unlink(missing_ok=True)
        return any((pid_in(mark) and beat.exists()) or time.sleep(0.02) for _ in range(500))

    supervisor.start(Child("api", python(program, mark, beat), answers, probes=2))
    first = pid_in(mark)
    supervisor.check()
    assert messages[1:] == [], "it answers"
    os.kill(first, signal.SIGSTOP)
    supervisor.check()
    assert messages[1:] == [], "one failed check is none"
    until(lambda: pid_in(mark) not in (0, first), "the restart", supervisor.check)
    assert not is_alive(first)
    said = ["2 health checks in a row failed; ending it", "ended with signal 9; restarting in 0.01 s"]
    assert messages[1:] == [f"api: {words}" for words in said]


def test_a_log_is_rotated_while_its_child_writes(supervisor: Supervisor, tmp_path: Path) -> None:
    program = "import time\nfor n in range(10**6): print(f'{n:059d}', flush=True); time.sleep(0.001)"
    supervisor.start(Child("api", python(program), lambda: True))
    log, rotated = tmp_path / "logs" / "api.log", tmp_path / "logs" / "api.log.1"

    def numbers(file: Path) -> list[int]:
        """Of the whole lines; fails on the gap that a child leaves which does not append."""
        return [int(line) for line in file.read_text().split("\n") if len(line) == 59] if file.exists() else []

    until(lambda: min(numbers(rotated), default=0) > 100, "a second rotation", supervisor.check)
    until(lambda: len(numbers(log)) > 10, "lines after it")
    assert rotated.stat().st_size > 10_000
    assert min(numbers(log)) > max(numbers(rotated)), "the log was emptied"
    assert b"\0" not in rotated.read_bytes() + log.read_bytes(), "the child appends"


def test_a_missing_log_and_a_full_disk_are_said_once_and_end_nothing(
    supervisor: Supervisor, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    mark, log = tmp_path / "mark", tmp_path / "logs" / "api.log"
    supervisor.start(Child("api", python(program, mark), lambda: pid_in(mark) > 0))
    first = pid_in(mark)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log.unlink()
    for _ in range(2):
        supervisor.check()
    with monkeypatch.context() as patched:
        patched.setattr("gxpo_services.local.supervisor.subprocess.Popen", full)
        os.kill(first, signal.SIGKILL)
        until(lambda: len(messages) > 3, "a start that fails", supervisor.check)
        for _ in range(2):
            supervisor.check()
    with monkeypatch.context() as patched:
        patched.setattr("gxpo_services.local.supervisor.write_json", full)
        until(lambda: pid_in(mark) not in (0, first), "the restart", supervisor.check)
        for _ in range(2):
            supervisor.check()
    supervisor.check()
    (process,) = json.loads((tmp_path / "up.json").read_text())["processes"]
    assert process["pid"] == pid_in(mark), "recorded once there is room"
    assert messages[1:] == [
        f"api: {log} is gone; restart `gxpo up` to log again",
        "api: ended with signal 9; restarting in 0.01 s",
        "api: [Errno 28] No space left on device",
        "state: [Errno 28] No space left on device",
    ]


def test_a_start_is_tried_so_often_then_an_error_with_the_end_of_the_log(
    supervisor: Supervisor, messages: list[str]
) -> None:
    """Another program took the port after it was chosen and answers there; the child cannot have it and ends."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        program = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))"
        with pytest.raises(StartError, match=r"(?s)api ended with code 1 during start-up.*Address already in use"):
            supervisor.start(Child("api", python(program, port), lambda: True, port=port, tries=2))
    assert messages == ["api: ended with code 1 during start-up; retrying"]


def test_a_shutdown_request_ends_the_wait(tmp_path: Path) -> None:
    shutdown = threading.Event()
    shutdown.set()
    supervisor = Supervisor(tmp_path / "up.json", tmp_path / "logs", print, shutdown)
    with pytest.raises(Stopped):
        supervisor.start(Child("api", python(IDLE), lambda: False))
    (process,) = json.loads((tmp_path / "up.json").read_text())["processes"]
    supervisor.stop()
    assert not is_alive(process["pid"])
    assert not (tmp_path / "up.json").exists()


# Leaves a process behind that belongs to nobody, starts one in a session of its own, and lives on, whatever it is told.
DAEMON = """
    import os, pathlib, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(sys.argv[1] + "-inner").write_text(str(inner.pid))
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    time.sleep(600)
"""

# A process of its own, as `gxpo up` is one: it adopts what its children orphan.
WHOLE = """
    import pathlib, sys, threading, time
    from gxpo_services.local.supervisor import Child, Supervisor

    folder = pathlib.Path(sys.argv[1])
    supervisor = Supervisor(folder / "up.json", folder / "logs", print, threading.Event())
    supervisor.adopt_orphans()
    mark = folder / "orphan"
    words = [sys.executable, "-c", sys.argv[2], str(mark)]
    supervisor.start(Child("ray", words, lambda: mark.exists() and mark.read_text(), stop_s=0.2))
    (folder / "ready").touch()
    while not (folder / "end").exists():
        supervisor.check()
        time.sleep(0.05)
    supervisor.stop()
"""


def test_a_stop_kills_children_that_ignore_sigterm_their_children_and_daemons(tmp_path: Path) -> None:
    whole = subprocess.Popen(python(WHOLE, tmp_path, textwrap.dedent(DAEMON)))
    until((tmp_path / "ready").exists, "the children")
    orphan, inner = pid_in(tmp_path / "orphan"), pid_in(tmp_path / "orphan-inner")
    (child,) = json.loads((tmp_path / "up.json").read_text())["processes"]
    assert psutil.Process(orphan).ppid() == whole.pid
    assert is_alive(inner)
    (tmp_path / "end").touch()
    assert whole.wait(LONG_S) == 0
    assert [pid for pid in (orphan, child["pid"], inner) if is_alive(pid)] == []


def test_only_recorded_processes_that_are_still_the_same_are_ended(tmp_path: Path) -> None:
    program = """
        import pathlib, subprocess, sys, time
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(sys.argv[1]).write_text(str(inner.pid))
        time.sleep(600)
    """
    mark = tmp_path / "mark"
    left_behind, other = (subprocess.Popen(python(words, mark)) for words in (program, IDLE))
    try:
        until(lambda: pid_in(mark), "the inner process")
        records = [
            {"name": "ray", "pid": left_behind.pid, "start": process_start(left_behind.pid)},
            {"name": "api", "pid": other.pid, "start": process_start(other.pid) + 1},
        ]
        state = tmp_path / "up.json"
        state.write_text(json.dumps({"pid": 1, "start": 1, "processes": records}))
        messages: list[str] = []
        stop_orphans(state, messages.append)
        assert not is_alive(left_behind.pid)
        assert not is_alive(pid_in(mark))
        assert other.poll() is None
        assert len(messages) == 1
        assert not state.exists()
    finally:
        for process in (left_behind, other):
            process.kill()
            process.wait()


def test_a_state_that_cannot_be_read_is_an_error_not_a_guess(tmp_path: Path) -> None:
    state = tmp_path / "up.json"
    stop_orphans(state, print)
    state.write_text('{"processes": [{"pid": ')
    with pytest.raises(DataError, match=r"up\.json cannot be read"):
        stop_orphans(state, print)
    assert state.exists()
