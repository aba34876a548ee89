"""Faults of a service under `gxpo up`, and of its runs: processes killed and stopped, a full disk, a host lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg

from benchmarks.up_process import UpProcess
from gxpo_client.errors import ServiceError
from gxpo_trainer.runtime.locks import process_start

_ACTORS = ("ray::SamplerActor", "ray::VerifierActor", "ray::LearnerRank")
_SHORT_S = (2.0, 8.0)
"""Time for which a disk is full and a service process is stopped: longer than a lease, at times."""


class SecondScheduler:
    """A second scheduler for the service of `gxpo up`, with its settings; restarted after it was killed."""

    def __init__(self, up: UpProcess) -> None:
        self._env = up.children()["scheduler"].environ()
        self._log = (up.home / "logs" / "second-scheduler.log").open("ab")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "gxpo_trainer.cli", "scheduler"]
        self.process = psutil.Popen(command, env=self._env, stdout=self._log, stderr=self._log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class Disk:
    """A file system of its own at a folder, so that it can be full. Needs root."""

    def __init__(self, folder: Path, size: str = "3g") -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "gxpo-soak", str(folder)], check=True)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        filler = self.folder / ".filler"
        try:
            with filler.open("wb") as file:
                _take_all(file.fileno())
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Faults:
    """database: URL of the server whose connections are cut, None without one. disk: None where none can be filled."""

    def __init__(self, up: UpProcess, chance: random.Random, *, database: str | None, disk: Disk | None) -> None:
        self._up, self._chance, self._database, self._disk = up, chance, database, disk
        self.second = SecondScheduler(up)
        self._shares: dict[str, tuple[int, Callable[[], bool]]] = {
            "trainer killed": (4, self._kill_trainer),
            "trainer stopped": (1, self._stop_trainer),
            "actor stopped": (3, self._stop_actor),
            "api killed": (4, lambda: self._kill("api")),
            "api stopped for a while": (2, lambda: self._stop("api")),
            "scheduler killed": (4, self._kill_scheduler),
            "scheduler stopped for a while": (3, lambda: self._stop("scheduler")),
            "ray's head lost": (1, lambda: self._kill("ray")),
            "host lost, a file cut": (2, self._lose_host),
        }
        if database is not None:
            self._shares["database connections cut"] = (4, self._cut_connections)
        if disk is not None:
            self._shares["disk full for a while"] = (3, self._fill_disk)

    def inject(self) -> str | None:
        """A fault at random; its name, or None when it found no victim."""
        if not self.second.process.is_running() or self.second.process.poll() is not None:
            self.second.start()
        names = list(self._shares)
        (name,) = self._chance.choices(names, weights=[self._shares[name][0] for name in names])
        with contextlib.suppress(psutil.NoSuchProcess):  # its victim has just ended
            return name if self._shares[name][1]() else None
        return None

    def close(self) -> None:
        self.second.close()

    def _kill_trainer(self) -> bool:
        return self._signal(signal.SIGKILL, trainers(self._up.home / "artifacts"))

    def _stop_trainer(self) -> bool:
        """The run's driver hangs for good: no heartbeat either."""
        return self._signal(signal.SIGSTOP, trainers(self._up.home / "artifacts"))

    def _stop_actor(self) -> bool:
        """A process of the run hangs for good, while the driver goes on sending heartbeats."""
        return self._signal(signal.SIGSTOP, [process.pid for process in self.actors()])

    def actors(self) -> list[psutil.Process]:
        """Sampler, verifier and learner processes of runs."""
        ray = self._up.children().get("ray")
        descendants = ray.children(recursive=True) if ray is not None else []
        return [process for process in descendants if _title(process).startswith(_ACTORS)]

    def _signal(self, number: signal.Signals, pids: list[int]) -> bool:
        if not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(pids), number)
        return True

    def _kill(self, name: str) -> bool:
        process = self._up.children().get(name)
        if process is None:
            return False
        # Ray's head with all its children, as a host failure ends them; this includes the runs' processes.
        for victim in [process, *(process.children(recursive=True) if name == "ray" else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        return True

    def _kill_scheduler(self) -> bool:
        if self._chance.random() < 0.5:
            return self._kill("scheduler")
        self.second.process.kill()
        self.second.process.wait()
        return True

    def _stop(self, name: str) -> bool:
        process = self._up.children().get(name)
        if process is None:
            return False
        process.suspend()
        threading.Timer(self._chance.uniform(*_SHORT_S), _resume, [process]).start()
        return True

    def _lose_host(self) -> bool:
        """Everything of Ray ends, and what the trainers had not synced to the disk is gone, in the middle of a line."""
        running = [run["id"] for run in self._up.runs() if run["state"] == "running"]
        if not running or not self._kill("ray"):
            return False
        for run_id in running:
            folder = self._up.home / "artifacts" / run_id
            for pid in trainers(folder.parent, run_id):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # What the service has, and what a checkpoint counts, had been synced before.
            saved = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*")]
            cut_after(folder / "metrics.jsonl", max([self._up.client.run(run_id)["progress"]["steps"] or 0, *saved]))
        return True

    def _cut_connections(self) -> bool:
        """Every connection to the database ends, those of transactions under way included."""
        url = (self._database or "").replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        return True

    def _fill_disk(self) -> bool:
        if self._disk is None:
            return False
        with contextlib.suppress(ServiceError), self._disk.full():
            time.sleep(self._chance.uniform(*_SHORT_S))
        return True


def trainers(artifacts: Path, run_id: str = "*") -> list[int]:
    """Pids of running trainers, from the lock files of the runs' folders."""
    pids = []
    for lock in artifacts.glob(f"{run_id}/.lock"):
        words = lock.read_text(encoding="utf-8").split()
        if len(words) == 2 and process_start(int(words[0])) == int(words[1]):
            pids.append(int(words[0]))
    return pids


def cut_after(path: Path, step: int) -> None:
    """Cut a file of rows in the middle of the first row of a later step."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with contextlib.suppress(ValueError):  # a line that was cut before
            if json.loads(line)["step"] > step:
                os.truncate(path, kept + len(line) // 2)
                return
        kept += len(line)


def _take_all(file: int) -> None:
    """Take the space that is left, in ever smaller pieces: others write at the same time."""
    size, taken = 1 << 30, 0
    while size >= 4096:
        try:
            os.posix_fallocate(file, taken, size)
            taken += size
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size //= 2


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        return str(process.cmdline()[0])
    return ""


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
