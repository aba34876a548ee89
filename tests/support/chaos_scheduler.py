"""A scheduler as a process whose trainers are stand-ins, and whose jobs, processes of this machine, outlive it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from gxpo_services import logging
from gxpo_services.scheduling.launcher import Job, JobStatus
from gxpo_services.scheduling.scheduler import serve
from gxpo_services.settings import ServiceSettings, make_home

TRAINER = Path(__file__).with_name("stand_in_trainer.py")
_HIDDEN = ("GXPO_DATABASE", "GXPO_TOKEN")
"""Beginnings of the variables that a trainer has no business with."""


class ProcessLauncher:
    """Each job is a session of its own with three files in `folder`.

        <job>.lock    locked by the job's processes for as long as one of them lives
        <job>.pid     the session's number
        <job>.exit    the exit code, once the command has ended

    The lock is taken before the fork and inherited, so a launcher that dies in between leaves either a job that runs
    or none, and a second one, in whatever process, finds out which. It also proves that the number in <job>.pid is
    still this session's.

    kill_after_s: time between asking a job to end and killing it.
    """

    def __init__(self, folder: Path, *, kill_after_s: float) -> None:
        self._folder = folder
        self._kill_after_s = kill_after_s
        self._children: list[subprocess.Popen[bytes]] = []
        self._stopped_at: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def submit(self, job: Job) -> None:
        with self._file(job.id, "lock").open("a") as lock:
            if not _take(lock) or self._file(job.id, "pid").exists():
                return  # it runs, or it ran
            child = subprocess.Popen(
                ["/bin/sh", "-c", self._script(job)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
                env={n: value for n, value in os.environ.items() if not n.startswith(_HIDDEN)} | dict(job.env),
            )
            self._children.append(child)

    def status(self, job_id: str) -> JobStatus:
        self._children = [child for child in self._children if child.poll() is None]
        if not self._file(job_id, "lock").exists():
            return JobStatus("unknown")
        if self._is_alive(job_id):
            return JobStatus("running")
        self._stopped_at.pop(job_id, None)
        code = self._number(job_id, "exit")
        if code is not None:
            return JobStatus("succeeded" if code == 0 else "failed", f"exit code {code}")
        started = self._file(job_id, "pid").exists()
        return JobStatus("failed", "its processes were killed") if started else JobStatus("unknown")

    def stop(self, job_id: str) -> None:
        session = self._number(job_id, "pid")
        if session is None or not self._is_alive(job_id):
            return
        since = self._stopped_at.setdefault(job_id, time.monotonic())
        late = time.monotonic() - since >= self._kill_after_s
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(session, signal.SIGKILL if late else signal.SIGTERM)

    def delete(self, job_id: str) -> None:
        for kind in ("exit", "pid", "lock"):
            self._file(job_id, kind).unlink(missing_ok=True)

    def statuses(self, artifacts: Path) -> dict[str, JobStatus]:
        statuses = {file.stem: self.status(file.stem) for file in self._folder.glob("*.lock")}
        return {job_id: status for job_id, status in statuses.items() if status.state != "unknown"}

    def resources(self) -> tuple[float, float]:
        """The cores of this machine. Its GPUs are not counted: use Ray for them."""
        return float(len(os.sched_getaffinity(0))), 0.0

    def _script(self, job: Job) -> str:
        pid, code = (shlex.quote(str(self._file(job.id, kind))) for kind in ("pid", "exit"))
        command = f"{shlex.join(job.command)} >> {shlex.quote(str(job.log))} 2>&1"
        # The shell survives SIGTERM to write the code of its command, for which the signal is as usual.
        return (
            f"trap : TERM; echo $$ > {pid}.part && mv {pid}.part {pid} || exit 1\n"
            f"{command}\n"
            f"echo $? > {code}.part && mv {code}.part {code}"
        )

    def _is_alive(self, job_id: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._file(job_id, "lock").open("r+") as lock:
            return not _take(lock)
        return False

    def _number(self, job_id: str, kind: str) -> int | None:
        file = self._file(job_id, kind)
        return int(file.read_text(encoding="ascii")) if file.exists() else None

    def _file(self, job_id: str, kind: str) -> Path:
        return self._folder / f"{job_id}.{kind}"


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def command(folder: Path) -> list[str]:
    files = [str(folder / "config.toml"), "--out", str(folder), "--continue", "--service", str(folder / "service.json")]
    return [sys.executable, str(TRAINER), *files]


if __name__ == "__main__":
    settings = ServiceSettings()
    logging.configure(as_json=False)
    make_home(settings)
    serve(settings, ProcessLauncher(settings.home.resolve() / "jobs", kill_after_s=2.0), command=command)
