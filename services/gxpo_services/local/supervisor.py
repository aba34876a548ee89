"""Supervision of child processes: start, readiness, restart with back-off, and complete shutdown.

Every child has its own session, so that Ctrl-C reaches only this process, and gets SIGTERM from the kernel when this
process dies. After `adopt_orphans`, orphaned descendants become children of this process and are stopped too. Processes
are identified by pid and start time, never by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gxpo_trainer.errors import DataError, GxpoError
from gxpo_trainer.jsonl import write_json
from gxpo_trainer.runtime.locks import process_start

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_END_WITH_PARENT = functools.partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
"""Runs in a child before exec: the kernel sends it SIGTERM when its parent dies."""
_POLL_S = 0.2
LARGEST_LOG = 16 * 1024 * 1024
"""Bytes after which a log is rotated."""
PROBE_EVERY_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 1.0, 30.0, 60.0
"""The pause before a restart doubles while the child lives no longer than STEADY_S."""
_REAP_EVERY_S = 10.0


class StartError(GxpoError):
    """A process did not start; the message contains the end of its log."""


class Stopped(GxpoError):
    """Shutdown was requested during start-up."""

    exit_code = 130


@dataclass(eq=False)
class Child:
    """A process to supervise. ready: readiness check; start_s: its time-out; tries: attempts of the first start.
    probes: failed checks in a row, one every PROBE_EVERY_S, after which it is restarted.

    port: TCP port on which it must listen itself to be ready; another program there could answer the readiness check.
    """

    name: str
    command: Sequence[str]
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 300.0
    stop_s: float = 15.0
    tries: int = 1
    probes: int = 3
    port: int | None = None
    process: subprocess.Popen[bytes] = field(init=False)
    begun: float = field(init=False)
    deaths: int = field(default=0, init=False)
    restart_at: float | None = field(default=None, init=False)
    """Time of the next restart; None while it is alive."""
    ready_by: float | None = field(default=None, init=False)
    """Time by which a restarted child must be ready; None once it is."""
    probed_at: float = field(default=0.0, init=False)
    failures: int = field(default=0, init=False)

    def is_ready(self) -> bool:
        return self.ready() and (self.port is None or self.port in _listened_on(self.process.pid))


class Supervisor:
    """Supervises children. state_file: receives their pids and `about`; log_dir: one log file per child.

    say: prints a message. until: set to request shutdown.
    """

    def __init__(
        self,
        state_file: Path,
        log_dir: Path,
        say: Callable[[str], None],
        until: threading.Event,
        about: Mapping[str, object] | None = None,
    ) -> None:
        self._state_file, self._log_dir, self._say, self._until = state_file, log_dir, say, until
        self._about = about or {}
        self._children: list[Child] = []
        self._is_recorded = False
        self._said: set[str] = set()
        self._adopts = False
        self._reaped_at = time.monotonic()
        log_dir.mkdir(parents=True, exist_ok=True)

    def adopt_orphans(self) -> None:
        """Become a child subreaper, so that `stop` also stops orphaned descendants.

        Only for a process whose children are all supervised.
        """
        if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._adopts = True

    def start(self, *children: Child) -> None:
        """Spawn children and wait until each is ready. Raises StartError, or Stopped on a shutdown request."""
        begun = time.monotonic()
        for child in children:
            self._spawn(child)
            self._children.append(child)
        self._record()
        for child in children:
            self._wait(child)
            self._say(f"{child.name}: ready after {time.monotonic() - begun:.0f} s")

    def check(self) -> None:
        """Restart children that are dead, do not answer, or are not ready within `start_s` of a restart, with back-off;
        rotate their logs. What the disk or the system refuses is tried again: it must not end the rest."""
        now = time.monotonic()
        for child in self._children:
            with self._tolerated(child.name):
                self._check(child, now)
        if not self._is_recorded:
            with self._tolerated("state"):
                self._record()
        if self._adopts and now - self._reaped_at > _REAP_EVERY_S:
            self._reaped_at = now
            self._reap()

    def stop(self) -> None:
        """Stop every child and its descendants: SIGTERM, then SIGKILL after `stop_s`."""
        family = self._family()
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
                try:
                    child.process.wait(child.stop_s)
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()
        rest = [process for process in {*family, *self._family()} if _is_alive(process)]
        _end_all(rest, signal.SIGKILL)
        if self._adopts:
            self._reap()
        self._children = []
        self._state_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Say each error of the disk or the system once, and suppress it."""
        try:
            yield
        except OSError as error:
            text = f"{what}: {error}"
            if text not in self._said:
                self._said.add(text)
                self._say(text)

    def _check(self, child: Child, now: float) -> None:
        code = child.process.poll()
        if code is not None and child.restart_at is None:
            child.deaths = 1 if now - child.begun > STEADY_S else child.deaths + 1
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (child.deaths - 1))
            child.restart_at = now + pause
            how = f"code {code}" if code >= 0 else f"signal {-code}"
            self._say(f"{child.name}: ended with {how}; restarting in {pause:g} s")
        if child.restart_at is not None and now >= child.restart_at:
            self._spawn(child)
            child.restart_at, child.ready_by = None, now + child.start_s
        elif code is None and (child.ready_by is not None or now - child.probed_at >= PROBE_EVERY_S):
            self._probe(child, now)
        self._rotate(child)

    def _family(self) -> list[psutil.Process]:
        """All descendants of the children, and adopted orphans."""
        if self._adopts:
            return list(psutil.Process().children(recursive=True))
        family: list[psutil.Process] = []
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(child.process.pid).children(recursive=True)
        return family

    def _spawn(self, child: Child) -> None:
        child.begun = time.monotonic()
        with (self._log_dir / f"{child.name}.log").open("ab") as log:
            child.process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.env},
                start_new_session=True,
                preexec_fn=_END_WITH_PARENT,
            )
        self._is_recorded = False

    def _wait(self, child: Child) -> None:
        give_up = time.monotonic() + child.start_s
        tries = 1
        while not child.is_ready():
            if self._until.wait(_POLL_S):
                raise Stopped("stopped during start-up")
            code = child.process.poll()
            if code is not None and tries < child.tries:
                tries += 1
                self._say(f"{child.name}: ended with code {code} during start-up; retrying")
                self._spawn(child)
                self._record()
            elif code is not None:
                raise StartError(f"{child.name} ended with code {code} during start-up{self._log_tail(child)}")
            if time.monotonic() > give_up:
                raise StartError(f"{child.name} is not ready after {child.start_s:g} s{self._log_tail(child)}")

    def _probe(self, child: Child, now: float) -> None:
        """End a child that hangs, or that does not become ready after its restart; the next round restarts it."""
        child.probed_at = now
        if child.is_ready():
            child.failures, child.ready_by = 0, None
            return
        if child.ready_by is None:
            child.failures += 1
            hangs, why = child.failures >= child.probes, f"{child.failures} health checks in a row failed"
        else:
            hangs, why = now > child.ready_by, f"not ready {child.start_s:g} s after its restart"
        if hangs:
            self._say(f"{child.name}: {why}; ending it")
            child.failures = 0
            family = psutil.Process(child.process.pid).children(recursive=True)
            child.process.kill()
            child.process.wait()  # not by psutil, which would take the exit code
            _end_all(family, signal.SIGKILL)

    def _rotate(self, child: Child) -> None:
        """Copy a large log and empty it: the child appends to the open file."""
        file = self._log_dir / f"{child.name}.log"
        if not file.exists():
            raise OSError(f"{file} is gone; restart `gxpo up` to log again")
        if file.stat().st_size > LARGEST_LOG:
            with contextlib.suppress(OSError):  # on a full disk, emptying it is what helps
                shutil.copyfile(file, file.with_name(f"{file.name}.1"))
            os.truncate(file, 0)

    def _log_tail(self, child: Child) -> str:
        file = self._log_dir / f"{child.name}.log"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "".join([f"; the end of {file}:", *(f"\n  {line}" for line in lines)]) if lines else f"; see {file}"

    def _record(self) -> None:
        def of(pid: int) -> dict[str, int]:
            return {"pid": pid, "start": process_start(pid)}

        processes = [{"name": child.name, **of(child.process.pid)} for child in self._children]
        write_json(self._state_file, {**self._about, **of(os.getpid()), "processes": processes})
        self._is_recorded = True

    def _reap(self) -> None:
        own = {child.process.pid for child in self._children}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)


def stop_orphans(state_file: Path, say: Callable[[str], None]) -> None:
    """Stop processes left running by a killed supervisor, identified by its state file."""
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        processes = [(str(p["name"]), int(p["pid"]), int(p["start"])) for p in state["processes"]]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{state_file} cannot be read ({error}); stop that start's processes, then delete it") from None
    for name, pid, start in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if start != 0 and process_start(pid) == start:
                say(f"stopping {name} (process {pid}), orphaned by a killed start")
                orphan = psutil.Process(pid)
                family = [orphan, *orphan.children(recursive=True)[::-1]]
                _end_all(_end_all(family, signal.SIGTERM), signal.SIGKILL)
    state_file.unlink(missing_ok=True)


def _listened_on(pid: int) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        sockets = psutil.Process(pid).net_connections("tcp")
        return {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return set()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _end_all(processes: Sequence[psutil.Process], number: signal.Signals) -> list[psutil.Process]:
    """Signal processes; returns those still alive after 10 s. psutil compares start times: a reused pid is safe."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    alive: list[psutil.Process] = psutil.wait_procs(processes, timeout=10)[1]
    return alive
