"""Does every run survive? Real runs under `gxpo up`, whose parts are killed with -9 at random moments.

    python -m benchmarks.soak [--runs 20] [--kills 20] [--steps 6] [--seed 0] [--home DIR]

`gxpo up` starts and restarts API, scheduler and Ray; the runs train the starter policy for a few steps each. Killed
are the API, the scheduler, Ray's head with all that belongs to it, and trainers. At the end every run has succeeded,
each of its steps is in its history once, and what the service answers is what lies on the disk. Takes minutes a run,
so it is no part of the tests and not among the benchmarks that `make bench` runs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, save
from benchmarks.up_process import UpProcess
from gxpo_trainer.jsonl import decode_number
from gxpo_trainer.records.reading import read_metrics
from gxpo_trainer.training.run_lock import process_start

VICTIMS = {"trainer": 4, "api": 2, "scheduler": 2, "ray": 1}
"""How often each is killed, in proportion."""
ENDED = ("succeeded", "failed", "cancelled")
SERVICE = {"GXPO_LEASE_S": "5", "GXPO_MAX_RECOVERIES": "1000", "GXPO_MAX_CONCURRENT_RUNS": "1"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--home", type=Path, help="default: a temporary folder; kept when something is wrong")
    args = parser.parse_args(argv)
    home = (args.home or Path(tempfile.mkdtemp(prefix="gxpo-soak-"))).resolve()
    begun = time.monotonic()
    soak = Soak(home, random.Random(args.seed))
    try:
        ids = soak.submit(args.runs, args.steps)
        killed = soak.kill_and_wait(ids, args.kills)
        problems = [problem for run_id in ids for problem in soak.check(run_id, args.steps)]
        launches = [soak.client.run(run_id)["recoveries"] for run_id in ids]
    finally:
        soak.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    figures = [
        Figure("problems", len(problems), len(problems), len(problems), "", "0", not problems),
        _plain("runs", len(ids)),
        *(_plain(f"kills of {name}", number) for name, number in sorted(killed.items())),
        _plain("counted recoveries", sum(launches)),
        _plain("minutes", (time.monotonic() - begun) / 60),
    ]
    save("soak", figures, {"steps": args.steps, "seed": args.seed, **SERVICE})
    if problems:
        print(f"files are kept in {home}", file=sys.stderr)
    return 1 if problems else 0


class Soak:
    """Submits runs to `gxpo up`, kills processes, and checks the runs."""

    def __init__(self, home: Path, chance: random.Random) -> None:
        self.home, self._chance = home, chance
        self._up = UpProcess(home, SERVICE)
        self.client = self._up.client

    def submit(self, num_runs: int, steps: int) -> list[str]:
        """Submit runs, alternating between the rules."""
        found = []
        for number in range(num_runs):
            config = {
                "seed": number,
                "model": {"max_length": 192},
                "data": {"num_problems": 256},
                "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 64},
                "evaluation": {"every_steps": 0, "samples_per_prompt": 2, "num_problems": 16, "at_start": False},
                "checkpoint": {"every_steps": 2},
                "learner": {"rule": {"name": ("grpo", "sfpo", "gxpo")[number % 3]}},
                "budget": {"steps": steps},
            }
            body = {"config": config, "name": f"soak {number}"}
            found.append(self.client.submit(body, key=f"soak-{number}")["id"])
        return found

    def kill_and_wait(self, ids: list[str], num_kills: int) -> Counter[str]:
        """Kill processes at random, at most `num_kills` times, until all runs have ended; returns kills by name."""
        killed: Counter[str] = Counter()

        def ended() -> bool:
            runs = self._up.runs()
            if killed.total() < num_kills and any(run["state"] == "running" for run in runs):
                time.sleep(self._chance.uniform(0, 20))
                (name,) = self._chance.choices(list(VICTIMS), weights=list(VICTIMS.values()))
                if self._kill(name):
                    killed[name] += 1
                    print(f"killed {name} ({killed.total()} of {num_kills})", flush=True)
            return len(runs) == len(ids) and all(run["state"] in ENDED for run in runs)

        self._up.until(ended, "all runs to end")
        return killed

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

    def close(self) -> None:
        self._up.close()

    def _kill(self, name: str) -> bool:
        if name == "trainer":
            pids = _trainers(self.home / "artifacts")
            if not pids:
                return False
            os.kill(self._chance.choice(pids), signal.SIGKILL)
            return True
        process = self._up.children().get(name)
        if process is None:
            return False
        # Kill Ray's head with all its children, as a host failure does; this includes the runs' processes.
        victims = [process, *(process.children(recursive=True) if name == "ray" else [])]
        for victim in victims:
            if victim.is_running():
                victim.kill()
        return True


def _trainers(artifacts: Path) -> list[int]:
    """Pids of running trainers, from the lock files of the runs' folders."""
    found = []
    for lock in artifacts.glob("*/.lock"):
        words = lock.read_text(encoding="utf-8").split()
        if len(words) == 2 and process_start(int(words[0])) == int(words[1]):
            found.append(int(words[0]))
    return found


def _plain(name: str, value: Any) -> Figure:
    return Figure(name, value, value, value, "")


if __name__ == "__main__":
    sys.exit(main())
