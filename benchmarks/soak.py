"""Does every run survive? Real runs under `gxpo up` with a second scheduler, and faults at random moments.

    python -m benchmarks.soak [--runs 40] [--faults 200] [--steps 40] [--seed 0] [--home DIR]
        [--report FILE] [--picture FILE]

`gxpo up` starts and restarts API, scheduler and Ray; the runs train the starter policy for a few steps each. The faults
are those of `benchmarks.faults`: kill -9 and SIGSTOP of the service's and the runs' processes, Ray's head or its whole
host lost with an unsynced file, cut database connections, a full disk. At the end every run has succeeded, each of its
steps is in its history once, what the service answers is what lies on the disk, and no process or Ray job is left.
Cutting connections needs PostgreSQL's programs, filling a disk needs root; without them these faults are left out.
Where Prometheus is installed it watches the service, and its alerts are reported. Takes an hour or two, so it is not
among the benchmarks that `make bench` runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from benchmarks.faults import Disk, Faults, trainers
from benchmarks.measure import Figure, save, single
from benchmarks.monitoring import Prometheus
from benchmarks.up_process import UpProcess
from gxpo_client.formats import duration
from gxpo_services.cli.common import STATE_FILE
from gxpo_services.local.ray_head import TOKEN_FILE
from gxpo_trainer.jsonl import decode_number
from gxpo_trainer.reporting.reading import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.postgres import PostgresServer, find_programs

ENDED = ("succeeded", "failed", "cancelled")
SERVICE = {
    "GXPO_LEASE_S": "5",
    "GXPO_HEARTBEAT_S": "30",
    "GXPO_STOP_WAIT_S": "2",
    "GXPO_MAX_RECOVERIES": "20",
    "GXPO_MAX_FORGOTTEN": "20",
    "GXPO_MAX_CONCURRENT_RUNS": "2",
}
TIMEOUTS = dict.fromkeys(("sampling_s", "verifying_s", "updating_s", "syncing_s", "evaluating_s"), 40.0)
TIMEOUTS |= {"setup_s": 180.0, "checkpointing_s": 40.0}
_HALF = {"learner_cpus": 0.5, "sampler_cpus": 0.3, "verifier_cpus": 0.2, "learner_threads": 1, "sampler_threads": 1}
"""Placement of a run that leaves half of two CPUs to another."""
_LONGEST_WAIT_S = 10.0
STUCK_S = 900.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--home", type=Path, help="default: a temporary folder; kept when something is wrong")
    parser.add_argument("--report", type=Path, help="file for what happened, a line each")
    parser.add_argument("--picture", type=Path, help="file for the panels of the dashboard for operators")
    args = parser.parse_args(argv)
    home = (args.home or Path(tempfile.mkdtemp(prefix="gxpo-soak-"))).resolve()
    soak = Soak(home, args.seed)
    try:
        ids = soak.submit(args.runs, args.steps)
        injected = soak.inject_and_wait(ids, args.faults)
        problems = [problem for run_id in ids for problem in soak.check(run_id, args.steps)]
        problems += soak.check_idle()
        recoveries = sum(soak.client.run(run_id)["recoveries"] for run_id in ids)
        soak.say_alerts(args.picture)
    finally:
        soak.close()
    problems += left_processes(home)
    for problem in problems:
        soak.say(f"PROBLEM: {problem}")
    figures = [
        Figure("problems", len(problems), len(problems), len(problems), "", "0", not problems),
        single("runs", len(ids)),
        single("faults", injected.total()),
        *(single(name, number) for name, number in sorted(injected.items())),
        single("recoveries, without those of a lost Ray", recoveries),
        single("minutes", (time.monotonic() - soak.begun) / 60),
    ]
    save("soak", figures, {"steps": args.steps, "seed": args.seed, **SERVICE})
    if args.report is not None:
        args.report.write_text(
            "\n".join([*soak.report_lines, *(figure.line() for figure in figures)]) + "\n", encoding="utf-8"
        )
    if problems:
        print(f"files are kept in {home}", file=sys.stderr)
    return 1 if problems else 0


class Soak:
    """Submits runs to `gxpo up`, injects faults, and checks the runs."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.begun, self.report_lines = home, time.monotonic(), list[str]()
        self._reported_at = self.begun
        self._chance = random.Random(seed)
        programs = find_programs()
        self._postgres = PostgresServer(programs) if programs is not None else None
        database = self._postgres.create("gxpo") if self._postgres is not None else None
        self._disk = Disk(home / "artifacts") if os.geteuid() == 0 else None
        settings = SERVICE | ({"GXPO_DATABASE_URL": database} if database else {})
        self._up = UpProcess(home, settings)
        self.client = self._up.client
        watches = shutil.which("prometheus") is not None
        self._prometheus = Prometheus(home / "prometheus", self.client) if watches else None
        self._faults = Faults(self._up, self._chance, database=database, disk=self._disk)
        for missing, what in (
            (self._postgres, "no PostgreSQL: no connections are cut"),
            (self._disk, "not root: no disk is filled"),
        ):
            if missing is None:
                self.say(what)

    def say(self, text: str) -> None:
        self._reported_at = time.monotonic()
        line = f"{duration(time.monotonic() - self.begun):>14}  {text}"
        self.report_lines.append(line)
        print(line, flush=True)

    def submit(self, num_runs: int, steps: int) -> list[str]:
        """Submit runs, alternating between the rules."""
        ids = []
        for number in range(num_runs):
            config = {
                "seed": number,
                "model": {"max_length": 192},
                "data": {"num_problems": 256},
                "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 64},
                "evaluation": {"every_steps": 0, "samples_per_prompt": 2, "num_problems": 16, "at_start": False},
                "checkpoint": {"every_steps": 2},
                "placement": _HALF,
                "timeouts": TIMEOUTS,
                "learner": {"rule": {"name": ("grpo", "sfpo", "gxpo")[number % 3]}},
                "budget": {"steps": steps},
            }
            body = {"config": config, "name": f"soak {number}"}
            ids.append(self.client.submit(body, key=f"soak-{number}")["id"])
        return ids

    def inject_and_wait(self, ids: list[str], num_faults: int) -> Counter[str]:
        """Inject faults at random moments until all runs have ended; returns their numbers by name.

        The runs share the faults evenly, so that the last ones are disturbed as well.
        """
        injected: Counter[str] = Counter()
        ended: set[str] = set()

        def step() -> bool:
            runs = self._up.runs()
            for run in runs:
                if run["state"] in ENDED and run["id"] not in ended:
                    ended.add(run["id"])
                    self.say(f"run {len(ended)} of {len(ids)}: {run['state']}, {run['recoveries']} recoveries")
            share = num_faults * (len(ended) + 1) / len(ids)
            if injected.total() < share and any(run["state"] == "running" for run in runs):
                time.sleep(self._chance.uniform(0, _LONGEST_WAIT_S))
                name = self._faults.inject()
                if name is not None:
                    injected[name] += 1
                    self.say(f"fault {injected.total()} of {num_faults}: {name}")
            if time.monotonic() - self._reported_at > STUCK_S:
                raise RuntimeError(f"nothing has happened for {STUCK_S / 60:g} minutes; {self.home} has the logs")
            return len(ended) == len(ids)

        self._up.until(step, "all runs to end", hang_s=math.inf)
        return injected

    def check(self, run_id: str, steps: int) -> list[str]:
        """Problems found in a run."""
        run = self.client.run(run_id)
        if run["state"] != "succeeded":
            return [f"{run_id} is {run['state']}: {run['reason']} {run['detail']}"]
        rows = read_metrics(self.home / "artifacts" / run_id)
        problems = []
        if [row["step"] for row in rows] != list(range(1, steps + 1)):
            problems.append(f"{run_id}: steps on the disk are {[row['step'] for row in rows]}")
        if run["progress"]["steps"] != steps:
            problems.append(f"{run_id}: the service counts {run['progress']['steps']} steps of {steps}")
        for name in sorted({name for row in rows for name in row["metrics"]}):
            on_disk = {row["step"]: row["metrics"][name] for row in rows if name in row["metrics"]}
            curve = self.client.get(f"/runs/{run_id}/metrics", names=name)["series"][name]
            stored = dict(zip(curve["steps"], map(decode_number, curve["y"]), strict=True))
            if len(stored) != len(curve["steps"]) or repr(sorted(stored.items())) != repr(sorted(on_disk.items())):
                problems.append(f"{run_id}: {name} is {stored} in the service and {on_disk} on the disk")
        return problems

    def check_idle(self) -> list[str]:
        """Processes and Ray jobs of runs that are left a minute after the last run ended."""
        state = json.loads((self.home / STATE_FILE).read_text(encoding="utf-8"))
        headers = {"Authorization": f"Bearer {(self.home / TOKEN_FILE).read_text(encoding='utf-8').strip()}"}
        problems: list[str] = []
        for _ in range(60):
            jobs = httpx.get(f"{state['ray']}/api/jobs/", headers=headers, trust_env=False, timeout=30).json()
            problems = [
                f"Ray job {job['submission_id']} is left" for job in jobs if job["status"] in ("PENDING", "RUNNING")
            ]
            problems += [f"trainer {pid} is left" for pid in trainers(self.home / "artifacts")]
            problems += [f"process {process.pid} of a run is left" for process in self._faults.actors()]
            if not problems:
                break
            time.sleep(1)
        return problems

    def say_alerts(self, picture: Path | None) -> None:
        """Report the alerts that fired, and draw what operators would have seen."""
        if self._prometheus is None:
            self.say("Prometheus is not installed: no alerts, no picture")
            return
        self.say(f"alerts that fired: {', '.join(sorted(self._prometheus.fired())) or 'none'}")
        if picture is not None:
            self._prometheus.draw(picture)

    def close(self) -> None:
        if self._prometheus is not None:
            self._prometheus.close()
        self._faults.close()
        self._up.close()
        if self._disk is not None:
            self._disk.close()
        if self._postgres is not None:
            self._postgres.close()


def left_processes(home: Path) -> list[str]:
    """Processes of the service of a home that has been closed."""
    problems = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        words, env = process.info["cmdline"] or [], process.info["environ"] or {}
        if process.pid != os.getpid() and (
            env.get("GXPO_HOME") == str(home) or any(str(home) in word for word in words)
        ):
            problems.append(f"process {process.pid} is left: {' '.join(words)[:200]}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
