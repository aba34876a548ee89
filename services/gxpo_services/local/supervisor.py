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
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
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


@dataclass
class _Managed:
    child: Child
    process: subprocess.Popen[bytes]
    begun: float
    deaths: int = 0
    restart_at: float | None = None
    """Time of the next restart; None while it is alive."""
    ready_by: float | None = None
    """Time by which a restarted child must be ready; None once it is."""
    probed_at: float = 0.0
    failures: int = 0

    def is_ready(self) -> bool:
        return self.child.ready() and (self.child.port is None or self.child.port in _listened_on(self.process.pid))


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
        self._kept: list[_Managed] = []
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
        fresh = [_Managed(child, self._spawn(child), begun) for child in children]
        self._kept += fresh
        self._record()
        for kept in fresh:
            self._wait(kept)
            self._say(f"{kept.child.name}: ready after {time.monotonic() - begun:.0f} s")

    def check(self) -> None:
        """Restart children that are dead, do not answer, or are not ready within `start_s` of a restart, with back-off;
        rotate their logs."""
        now = time.monotonic()
        for kept in self._kept:
            code = kept.process.poll()
            if code is not None and kept.restart_at is None:
                self._schedule_restart(kept, code, now)
            if kept.restart_at is not None and now >= kept.restart_at:
                kept.process, kept.begun, kept.restart_at = self._spawn(kept.child), now, None
                kept.ready_by = now + kept.child.start_s
                self._record()
            elif code is None and (kept.ready_by is not None or now - kept.probed_at >= PROBE_EVERY_S):
                self._probe(kept, now)
            self._rotate(kept)
        if self._adopts and now - self._reaped_at > _REAP_EVERY_S:
            self._reaped_at = now
            self._reap()

    def stop(self) -> None:
        """Stop every child and its descendants: SIGTERM, then SIGKILL after `stop_s`."""
        family = self._family()
        for kept in reversed(self._kept):
            if kept.process.poll() is None:
                kept.process.terminate()
                try:
                    kept.process.wait(kept.child.stop_s)
                except subprocess.TimeoutExpired:
                    kept.process.kill()
                    kept.process.wait()
        rest = [process for process in {*family, *self._family()} if _is_alive(process)]
        _end_all(rest, signal.SIGKILL)
        if self._adopts:
            self._reap()
        self._kept = []
        self._state_file.unlink(missing_ok=True)

    def _family(self) -> list[psutil.Process]:
        """All descendants of the children, and adopted orphans."""
        if self._adopts:
            return list(psutil.Process().children(recursive=True))
        family: list[psutil.Process] = []
        for kept in self._kept:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(kept.process.pid).children(recursive=True)
        return family

    def _spawn(self, child: Child) -> subprocess.Popen[bytes]:
        with (self._log_dir / f"{child.name}.log").open("ab") as log:
            return subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.env},
                start_new_session=True,
                preexec_fn=_END_WITH_PARENT,
            )

    def _wait(self, kept: _Managed) -> None:
        give_up = time.monotonic() + kept.child.start_s
        tries = 1
        while not kept.is_ready():
            if self._until.wait(_POLL_S):
                raise Stopped("stopped during start-up")
            code = kept.process.poll()
            if code is not None and tries < kept.child.tries:
                tries += 1
                self._say(f"{kept.child.name}: ended with code {code} during start-up; retrying")
                kept.process = self._spawn(kept.child)
                self._record()
            elif code is not None:
                raise StartError(f"{kept.child.name} ended with code {code} during start-up{self._log_tail(kept)}")
            if time.monotonic() > give_up:
                raise StartError(f"{kept.child.name} is not ready after {kept.child.start_s:g} s{self._log_tail(kept)}")

    def _schedule_restart(self, kept: _Managed, code: int, now: float) -> None:
        kept.deaths = 1 if now - kept.begun > STEADY_S else kept.deaths + 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (kept.deaths - 1))
        kept.restart_at = now + pause
        how = f"code {code}" if code >= 0 else f"signal {-code}"
        self._say(f"{kept.child.name}: ended with {how}; restarting in {pause:g} s")

    def _probe(self, kept: _Managed, now: float) -> None:
        """End a child that hangs, or that does not become ready after its restart; the next round restarts it."""
        kept.probed_at = now
        if kept.is_ready():
            kept.failures, kept.ready_by = 0, None
        elif kept.ready_by is None:
            kept.failures += 1
            if kept.failures >= kept.child.probes:
                self._kill(kept, f"{kept.failures} health checks in a row failed")
        elif now > kept.ready_by:
            self._kill(kept, f"not ready {kept.child.start_s:g} s after its restart")

    def _kill(self, kept: _Managed, why: str) -> None:
        """Kill a child with all its processes."""
        self._say(f"{kept.child.name}: {why}; ending it")
        kept.failures = 0
        family = psutil.Process(kept.process.pid).children(recursive=True)
        kept.process.kill()
        kept.process.wait()  # not by psutil, which would take the exit code
        _end_all(family, signal.SIGKILL)

    def _rotate(self, kept: _Managed) -> None:
        """Copy a large log and empty it: the child appends to the open file."""
        file = self._log_dir / f"{kept.child.name}.log"
        if file.stat().st_size > LARGEST_LOG:
            with contextlib.suppress(OSError):  # on a full disk, emptying it is what helps
                shutil.copyfile(file, file.with_name(f"{file.name}.1"))
            os.truncate(file, 0)

    def _log_tail(self, kept: _Managed) -> str:
        file = self._log_dir / f"{kept.child.name}.log"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "".join([f"; the end of {file}:", *(f"\n  {line}" for line in lines)]) if lines else f"; see {file}"

    def _record(self) -> None:
        processes = [
            {"name": kept.child.name, "pid": kept.process.pid, "start": process_start(kept.process.pid)}
            for kept in self._kept
        ]
        own = os.getpid()
        write_json(self._state_file, {**self._about, "pid": own, "start": process_start(own), "processes": processes})

    def _reap(self) -> None:
        """Reap adopted orphans."""
        own = {kept.process.pid for kept in self._kept}
        for process in psutil.Process().children():
            try:
                if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue


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
        if start == 0 or process_start(pid) != start:
            continue
        say(f"stopping {name} (process {pid}), orphaned by a killed start")
        try:
            orphan = psutil.Process(pid)
            family = [*orphan.children(recursive=True), orphan]
        except psutil.NoSuchProcess:
            continue
        _end_all(_end_all(family[::-1], signal.SIGTERM), signal.SIGKILL)
    state_file.unlink(missing_ok=True)


def _listened_on(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}


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
