"""Faults of a service under `gxpo up`, and of its runs: processes killed and stopped, a database frozen, a full disk, a
host lost, clocks that jump."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from benchmarks.up_process import UpProcess
from gxpo_services.local.ray_head import free_port
from gxpo_services.local.supervisor import PROBE_EVERY_S
from gxpo_services.run_states import EXECUTING
from gxpo_trainer.rollout.environments import PROBE_INTERVAL_S, PROBE_LIMIT_S

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.postgres import PostgresServer
from support.service_processes import trainers

LEASE_S, ROUND_S, HEARTBEAT_S, STOP_WAIT_S, DATABASE_S = 5, 1, 30, 2, 15
SERVICE = {
    "GXPO_LEASE_S": str(LEASE_S),
    "GXPO_TICK_S": str(ROUND_S),
    "GXPO_HEARTBEAT_S": str(HEARTBEAT_S),
    "GXPO_STOP_WAIT_S": str(STOP_WAIT_S),
    "GXPO_DATABASE_TIMEOUT_S": str(DATABASE_S),
    "GXPO_MAX_RECOVERIES": "20",
    "GXPO_MAX_FORGOTTEN": "20",
    "GXPO_MAX_CONCURRENT_RUNS": "2",
}
_PHASE_S, _SAMPLING_S, _SETUP_S = 40.0, 80.0, 300.0
TIMEOUTS = dict.fromkeys(("verifying_s", "updating_s", "syncing_s", "checkpointing_s"), _PHASE_S)
TIMEOUTS |= {"sampling_s": _SAMPLING_S, "evaluating_s": _SAMPLING_S, "setup_s": _SETUP_S}
"""Of the runs. An environment that hangs is replaced before its engine counts as stalled."""
_ACTORS = {
    "ray::SamplerActor": _SAMPLING_S,
    "ray::VerifierActor": _PHASE_S,
    "ray::LearnerRank": _PHASE_S,
    "ray::EnvironmentActor": PROBE_LIMIT_S + PROBE_INTERVAL_S,
}
"""Processes of a run, and the time after which one that hangs is replaced."""
_STARTING = ("preparing", "waiting", "starting engines")
_SHORT_S = (2.0, 12.0)
"""Time for which a disk is full and a service process is stopped: longer than a lease, at times."""
TRAINER_STOPPED_S = (17.0, 21.0)
"""Longer than the silence that is shown, shorter than the one after which a run is recovered."""
_WHILE = " for a while"
_FROZEN_S = (5.0, 25.0)
_LARGEST_JUMP_S = 3600.0
SHOWN_SILENCE_S = 15.0
"""What `silent_s` promises (docs/service.md)."""
_BACK_OFF_S = 30.0
"""Longest pause of `gxpo up` before it restarts a process."""
_START_S = 30.0
"""Start of the API or of a scheduler on a busy machine."""
_PROBE_S = 5.0
"""Time-out of a probe of `gxpo up`."""
_ANSWER_S = 5.0
"""An answer of the API on a busy machine."""
_RAY_START_S = 60.0
_REPORT_S = 10.0
"""From the end of a job to the scheduler's round that finds it: Ray reports a job's end within seconds."""
_STARTING_S = 60.0
"""Start of a process of a run, after the one before it was killed."""

_CLOCK = """\
import mmap, os, struct, sys, time
if "gxpo_trainer.cli" in sys.orig_argv and "up" not in sys.orig_argv:
    with open(os.environ["SOAK_CLOCK"], "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    kernel = time.time
    time.time = lambda: kernel() + struct.unpack("d", offset)[0]
"""
"""A sitecustomize module: API, schedulers and trainers read the wall clock with an offset that another process sets.
`gxpo up` itself compares the clock only with times of files, which the kernel gives."""


@dataclass(eq=False)
class Fault:
    """An injected fault.

    noticed: whether the service or the run has reacted as documented; bound_s: time that it has for it, None where no
    reaction is promised. over: whether its cause has ended. ends: runs whose launch it may end.
    """

    name: str
    bound_s: float | None = None
    noticed: Callable[[], bool] = lambda: True
    over: Callable[[], bool] = lambda: True
    ends: frozenset[str] = frozenset()
    begun: float = field(default_factory=time.monotonic)
    noticed_s: float | None = None


class Clock:
    """The wall clock of one host's gxpo processes: an offset in a file that they map."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_CLOCK, encoding="utf-8")
        self._file = folder / name
        self.offset_s = 0.0
        self.move(0.0)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {"SOAK_CLOCK": str(self._file), "PYTHONPATH": os.pathsep.join(paths)}

    def move(self, offset_s: float) -> None:
        self.offset_s = offset_s
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("d", offset_s))


class SecondScheduler:
    """A second scheduler for the service of `gxpo up`, with its settings and a clock of its own."""

    def __init__(self, up: UpProcess, clock: Clock) -> None:
        self._env = up.children()["scheduler"].environ() | clock.env
        self._log = (up.home / "logs" / "second-scheduler.log").open("ab")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "gxpo_trainer.cli", "scheduler"]
        self.process = psutil.Popen(command, env=self._env, stdout=self._log, stderr=self._log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def judged(response: str) -> float:
    """The reward that the server below gives."""
    return len(response) % 10 / 10


class RewardServer:
    """A server of rewards over HTTP, in a process of its own."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/"
        self.start()

    def start(self) -> None:
        self.process = psutil.Popen([sys.executable, "-m", "benchmarks.faults", str(self._port)])

    @contextmanager
    def away(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"reward": judged(asked["response"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No log."""


class Disk:
    """A file system of its own at a folder, so that it can be full. Needs root."""

    def __init__(self, folder: Path, size: str = "3g") -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "gxpo-soak", str(folder)], check=True)

    @contextmanager
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
    """Injects faults at random. disk: None where none can be filled."""

    def __init__(
        self,
        up: UpProcess,
        chance: random.Random,
        *,
        postgres: PostgresServer,
        database: str,
        rewards: RewardServer,
        clocks: tuple[Clock, Clock],
        disk: Disk | None,
    ) -> None:
        self._up, self._chance, self._postgres, self._disk = up, chance, postgres, disk
        self._headers = {"Authorization": f"Bearer {(up.home / 'token').read_text(encoding='utf-8').strip()}"}
        self._database, self._rewards = database.replace("+psycopg", ""), rewards
        self._host_clock, self._second_clock = clocks
        self._second = SecondScheduler(up, self._second_clock)
        self._shares: dict[str, tuple[int, Callable[[str], Fault | None]]] = {
            "trainer killed": (4, self._kill_trainer),
            "trainer stopped": (1, self._stop_trainer),
            "trainer stopped for a while": (2, self._pause_trainer),
            "actor killed": (3, self._kill_actor),
            "actor stopped": (2, self._stop_actor),
            "api killed": (3, self._kill_api),
            "api stopped": (1, self._stop_api),
            "api stopped for a while": (2, self._pause_api),
            "scheduler killed": (4, self._kill_scheduler),
            "scheduler stopped for a while": (3, self._pause_scheduler),
            "ray's head lost": (1, self._lose_ray),
            "host lost, a file cut": (2, self._lose_host),
            "database connections cut": (3, self._cut_connections),
            "database frozen": (3, self._freeze_database),
            "clock of the host moved": (3, self._move_clock),
            "clock of a scheduler wrong for a while": (2, self._move_scheduler_clock),
            "reward server killed": (2, lambda name: self._for_a_while(name, self._rewards.away())),
            "reward server stopped for a while": (
                2,
                lambda name: self._for_a_while(name, _suspended(self._rewards.process)),
            ),
        }
        if disk is not None:
            self._shares["disk full for a while"] = (3, self._fill_disk)

    def inject(self, *, besides: str | None = None) -> Fault | None:
        """A fault at random, other than `besides`; None when it found no victim."""
        if not self._second.process.is_running() or self._second.process.poll() is not None:
            self._second.start()
        # The end of "api stopped for a while" would undo "api stopped".
        left_out = besides and besides.removesuffix(_WHILE)
        names = [name for name in self._shares if name.removesuffix(_WHILE) != left_out]
        (name,) = self._chance.choices(names, weights=[self._shares[name][0] for name in names])
        # Its victim has just ended, or the database is frozen.
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psycopg.OperationalError):
            return self._shares[name][1](name)
        return None

    def close(self) -> None:
        self._second.close()

    # ---- runs ---------------------------------------------------------------------------------------------------

    def executing(self, *, reporting: bool = False) -> dict[str, tuple[int, str]] | None:
        """Launch and owner of the lease of each executing run; None while the database does not answer.

        reporting: only those whose trainer has reported since its launch.
        """
        query = "SELECT id, launch, coalesce(lease_owner, '') FROM runs WHERE state = ANY(%s)"
        query += " AND heartbeat_at IS NOT NULL" if reporting else ""
        try:
            with psycopg.connect(self._database, autocommit=True, connect_timeout=5) as connection:
                rows = connection.execute(query, [sorted(EXECUTING)]).fetchall()
        except psycopg.OperationalError:
            return None
        return {row[0]: (row[1], row[2]) for row in rows}

    def _relaunched(self, before: Mapping[str, tuple[int, str]]) -> Callable[[], bool]:
        """Whether each of these runs has another launch, or has ended."""

        def relaunched() -> bool:
            now = self.executing()
            return now is not None and all(
                run not in now or now[run][0] > launch for run, (launch, _) in before.items()
            )

        return relaunched

    def _trainer(self, *, reporting: bool = False) -> tuple[int, dict[str, tuple[int, str]]] | None:
        """A trainer, and its run as `executing` has it."""
        found, runs = trainers(self._up.home / "artifacts"), self.executing(reporting=reporting) or {}
        pids = sorted(pid for pid, run in found.items() if run in runs)
        if not pids:
            return None
        pid = self._chance.choice(pids)
        return pid, {found[pid]: runs[found[pid]]}

    def _kill_trainer(self, name: str) -> Fault | None:
        if (victim := self._trainer()) is None:
            return None
        os.kill(victim[0], signal.SIGKILL)
        return Fault(name, _REPORT_S, self._relaunched(victim[1]), ends=frozenset(victim[1]))

    def _stop_trainer(self, name: str) -> Fault | None:
        """The run's driver hangs for good: no heartbeat either."""
        if (victim := self._trainer()) is None:
            return None
        os.kill(victim[0], signal.SIGSTOP)
        bound = HEARTBEAT_S + STOP_WAIT_S + _REPORT_S
        return Fault(name, bound, self._relaunched(victim[1]), ends=frozenset(victim[1]))

    def _pause_trainer(self, name: str) -> Fault | None:
        # One that has not reported is shown as starting, not as silent.
        if (victim := self._trainer(reporting=True)) is None:
            return None
        (run_id,) = victim[1]
        ended = self._relaunched(victim[1])

        def shown() -> bool:
            run = self._answer(f"/api/v1/runs/{run_id}")
            return run is not None and (run.json().get("silent_s") is not None or ended())

        paused = _suspended(psutil.Process(victim[0]))
        return self._for_a_while(name, paused, TRAINER_STOPPED_S, bound_s=SHOWN_SILENCE_S, noticed=shown)

    def actors(self) -> list[psutil.Process]:
        """Sampler, verifier, environment and learner processes of runs."""
        ray = self._up.children().get("ray")
        descendants = ray.children(recursive=True) if ray is not None else []
        return [process for process in descendants if _title(process).startswith(tuple(_ACTORS))]

    def _kill_actor(self, name: str) -> Fault | None:
        return self._lose_actor(name, signal.SIGKILL)

    def _stop_actor(self, name: str) -> Fault | None:
        """A process of a run hangs for good, while the driver goes on sending heartbeats."""
        return self._lose_actor(name, signal.SIGSTOP)

    def _lose_actor(self, name: str, number: signal.Signals) -> Fault | None:
        actors, runs = self.actors(), self.executing()
        if not actors or not runs:
            return None
        victim = self._chance.choice(actors)
        kind, job = _title(victim).split(".")[0], victim.environ().get("RAY_JOB_ID")
        bound = _STARTING_S
        if number == signal.SIGSTOP:
            phases = [str(run["phase"]) for run in self._up.runs() if run["id"] in runs]
            bound += _SETUP_S if any(phase.startswith(_STARTING) for phase in phases) else _ACTORS[kind]
        victim.send_signal(number)

        def replaced() -> bool:
            if _is_alive(victim):
                return False
            now = self.executing()
            if now is None or any(run not in now or now[run][0] > launch for run, (launch, _) in runs.items()):
                return now is not None
            likes = [actor for actor in self.actors() if _title(actor).startswith(kind) and actor not in actors]
            return any(actor.environ().get("RAY_JOB_ID") == job for actor in likes)

        return Fault(f"{name}: {kind.removeprefix('ray::')}", bound, replaced, ends=frozenset(runs))

    # ---- the service --------------------------------------------------------------------------------------------

    def _kill_api(self, name: str) -> Fault | None:
        return self._lose_api(name, signal.SIGKILL, _BACK_OFF_S + _START_S)

    def _stop_api(self, name: str) -> Fault | None:
        """The API hangs for good: `gxpo up` ends it after three probes and restarts it."""
        return self._lose_api(name, signal.SIGSTOP, 3 * (PROBE_EVERY_S + _PROBE_S) + _BACK_OFF_S + _START_S)

    def _lose_api(self, name: str, number: signal.Signals, bound_s: float) -> Fault | None:
        if (victim := self._up.children().get("api")) is None:
            return None
        victim.send_signal(number)
        return Fault(name, bound_s, lambda: not _is_alive(victim) and self._is_ready())

    def _pause_api(self, name: str) -> Fault | None:
        if (victim := self._up.children().get("api")) is None:
            return None
        fault = self._for_a_while(name, _suspended(victim))
        fault.noticed, fault.bound_s = lambda: fault.over() and self._is_ready(), _SHORT_S[1] + _ANSWER_S
        return fault

    def _scheduler(self) -> tuple[psutil.Process, float, Callable[[], bool]] | None:
        """A scheduler, if possible one that holds a run; how long another may need to take its runs over; and whether
        none of them is held by it any longer."""
        first = self._up.children().get("scheduler")
        both = [process for process in (first, self._second.process) if process is not None and _is_alive(process)]
        runs = self.executing()
        if not both or runs is None:
            return None
        holders = [process for process in both if any(_holds(process, owner) for _, owner in runs.values())]
        victim = self._chance.choice(holders or both)
        other_waits = any(self._has_started(process) for process in both if process is not victim)
        bound = LEASE_S + ROUND_S + (0.0 if other_waits else _BACK_OFF_S + _START_S)

        def taken_over() -> bool:
            now = self.executing()
            return now is not None and not any(_holds(victim, owner) for _, owner in now.values())

        return victim, bound, taken_over

    def _has_started(self, scheduler: psutil.Process) -> bool:
        """Whether it is in its rounds: importing its packages takes seconds, in which it can take over nothing."""
        logs = (self._up.home / "logs" / f"{name}.log" for name in ("scheduler", "second-scheduler"))
        return any(f":{scheduler.pid}:" in log.read_text(encoding="utf-8") for log in logs)

    def _kill_scheduler(self, name: str) -> Fault | None:
        if (found := self._scheduler()) is None:
            return None
        victim, bound_s, taken_over = found
        victim.kill()
        return Fault(name, bound_s, taken_over)

    def _pause_scheduler(self, name: str) -> Fault | None:
        if (found := self._scheduler()) is None:
            return None
        victim, bound_s, taken_over = found
        fault = self._for_a_while(name, _suspended(victim), bound_s=bound_s)
        fault.noticed = lambda: fault.over() or taken_over()
        return fault

    def _lose_ray(self, name: str) -> Fault | None:
        """Ray's head with all its children, as a host failure ends them; this includes the runs' processes."""
        ray, runs = self._up.children().get("ray"), self.executing()
        if ray is None or runs is None:
            return None
        # A run whose job was not submitted yet does not lose it.
        training = set(trainers(self._up.home / "artifacts").values())
        for victim in [ray, *ray.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        lost = {run: launch for run, launch in runs.items() if run in training}
        return Fault(name, _BACK_OFF_S + _RAY_START_S, self._relaunched(lost), ends=frozenset(runs))

    def _lose_host(self, name: str) -> Fault | None:
        """Everything of Ray ends, and what the trainers had not synced to the disk is gone, in the middle of a line."""
        artifacts = self._up.home / "artifacts"
        running = trainers(artifacts)
        if not running or (fault := self._lose_ray(name)) is None:
            return None
        for pid, run_id in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            # What the service has, and what a checkpoint counts, had been synced before.
            saved = [int(path.name.rpartition("-")[2]) for path in (artifacts / run_id).glob("checkpoints/step-*")]
            known = self._up.client.run(run_id)["progress"]["steps"] or 0
            cut_after(artifacts / run_id / "metrics.jsonl", max([known, *saved]))
        return fault

    def _cut_connections(self, name: str) -> Fault | None:
        """Every connection to the database ends, those of transactions under way included."""
        with psycopg.connect(self._database, autocommit=True, connect_timeout=5) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        return Fault(name, _ANSWER_S, self._is_ready)

    def _freeze_database(self, name: str) -> Fault | None:
        """The API must say so within its time-out."""
        fault = self._for_a_while(name, self._postgres.stopped(), _FROZEN_S, bound_s=DATABASE_S + _ANSWER_S)

        def says_so() -> bool:
            answer = self._answer("/api/v1/runs", DATABASE_S + _ANSWER_S)
            return answer is not None and answer.status_code in (200, 503)

        fault.noticed = says_so
        thawed = fault.over
        fault.over = lambda: thawed() and self._is_ready()
        return fault

    def _fill_disk(self, name: str) -> Fault | None:
        if self._disk is None:
            return None
        fault = self._for_a_while(name, self._disk.full())
        fault.ends = frozenset(self.executing() or ())
        return fault

    def _move_clock(self, name: str) -> Fault | None:
        """The host's clock jumps, as when it is set by hand: nothing may follow from it."""
        offset_s = self._chance.uniform(-_LARGEST_JUMP_S, _LARGEST_JUMP_S)
        for clock in (self._host_clock, self._second_clock):
            clock.move(offset_s)
        return Fault(name)

    def _move_scheduler_clock(self, name: str) -> Fault | None:
        """One scheduler's clock disagrees with all others until it is set right."""
        return self._for_a_while(name, self._wrong_clock())

    @contextmanager
    def _wrong_clock(self) -> Iterator[None]:
        self._second_clock.move(self._host_clock.offset_s + self._chance.uniform(-_LARGEST_JUMP_S, _LARGEST_JUMP_S))
        try:
            yield
        finally:
            self._second_clock.move(self._host_clock.offset_s)

    # ---- means --------------------------------------------------------------------------------------------------

    def _for_a_while(
        self,
        name: str,
        context: AbstractContextManager[None],
        seconds: tuple[float, float] = _SHORT_S,
        *,
        bound_s: float | None = None,
        noticed: Callable[[], bool] = lambda: True,
    ) -> Fault:
        """A fault that lasts as long as this context is open."""
        stack = ExitStack()
        stack.enter_context(context)
        timer = threading.Timer(self._chance.uniform(*seconds), stack.close)
        timer.start()
        return Fault(name, bound_s, noticed, over=lambda: not timer.is_alive())

    def _answer(self, path: str, timeout_s: float = 5.0) -> httpx.Response | None:
        client = self._up.client
        try:
            return httpx.get(client.url + path, headers=self._headers, timeout=timeout_s, trust_env=False)
        except httpx.HTTPError:
            return None

    def _is_ready(self) -> bool:
        answer = self._answer("/health/ready")
        return answer is not None and answer.status_code == 200


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


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _holds(scheduler: psutil.Process, owner: str) -> bool:
    """Whether a lease is this scheduler's: host:pid:random."""
    return owner.split(":")[1:2] == [str(scheduler.pid)]


@contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Judge).serve_forever()
