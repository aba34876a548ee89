"""Does every run survive? Real runs under `gxpo up` with a second scheduler, and faults at random moments.

    python -m benchmarks.soak --part K [--faults 100] [--seed 0] [--steps 40] [--home DIR] [--picture FILE]
    python -m benchmarks.soak report

A part writes its log and its result to docs/soak/; `report` sums all parts in docs/soak.txt. The runs train a starter
policy for a few steps each: strictly on-policy and asynchronous, in one turn and with the calculator, and with a reward
over HTTP. The faults are those of `benchmarks.faults`, one at a time and, of each three injections, one of two at a
time. The next comes once the service or the run has reacted to the last one, which must happen within the documented
limits. At the end every run has succeeded; each step, sample and evaluation is in its history once, and the service
answers what lies on the disk; training time has no waits; no run was launched again without a fault that explains it;
no process or Ray job is left. Needs PostgreSQL's programs, and root to fill a disk. Where Prometheus is installed it
watches the service, and its alerts are reported. A part takes half an hour or more, so it is not among the benchmarks
that `make bench` runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults import (
    SERVICE,
    TIMEOUTS,
    TRAINER_STOPPED_S,
    Clock,
    Disk,
    Fault,
    Faults,
    RewardServer,
    judged,
)
from benchmarks.monitoring import Prometheus
from benchmarks.up_process import UpProcess
from gxpo_client.formats import duration, number_of
from gxpo_services.cli.common import STATE_FILE
from gxpo_services.local.ray_head import TOKEN_FILE, free_port
from gxpo_trainer.jsonl import decode_number
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.postgres import NOT_INSTALLED, PostgresServer, find_programs
from support.service_processes import trainers

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "soak"
ENDED = ("succeeded", "failed", "cancelled")
_HALF = {"learner_cpus": 0.5, "sampler_cpus": 0.3, "verifier_cpus": 0.2, "learner_threads": 1, "sampler_threads": 1}
"""Placement of a run that leaves half of two CPUs to another."""
_CALCULATOR = {"name": "calculator", "max_turns": 3, "max_observation_tokens": 12}
_IN_FLIGHT = {"async_depth": 2, "update_in_flight": True}
KINDS: dict[str, dict[str, Any]] = {
    "strict, HTTP reward": {"http": True},
    "asynchronous": {"rollout": {"async_depth": 1}},
    "strict, calculator": {"environment": _CALCULATOR},
    "asynchronous in flight, HTTP reward": {"http": True, "rollout": _IN_FLIGHT},
    "asynchronous, calculator, HTTP reward": {"http": True, "rollout": {"async_depth": 1}, "environment": _CALCULATOR},
    "strict": {},
}
"""The runs of a part alternate between these and the rules."""
_WAITING = 3
"""Runs that are submitted and have not ended, while faults are left."""
_PAIRS = 1 / 3
_LONGEST_WAIT_S, _LONGEST_GAP_S = 10.0, 3.0
"""Before a fault, and between two at a time."""
_UNBOUNDED_S = 20.0
"""Longest effect on another fault of one that promises no reaction."""
GIVE_UP_S, STUCK_S = 600.0, 1800.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=["report"], help="sum the parts that were run")
    parser.add_argument("--part", type=int, default=0, help="number of this part, of which its faults depend")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--home", type=Path, help="default: a temporary folder; kept when something is wrong")
    parser.add_argument("--picture", type=Path, help="file for the panels of the dashboard for operators")
    args = parser.parse_args(argv)
    if args.command == "report":
        parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
        if not parts:
            raise SystemExit(f"{RESULTS} has no results; run a part first")
        text = report(parts)
        RESULTS.with_suffix(".txt").write_text(text, encoding="utf-8")
        print(text, end="")
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background jobs ignore the latter
        signal.signal(number, signal.default_int_handler)
    home = (args.home or Path(tempfile.mkdtemp(prefix="gxpo-soak-"))).resolve()
    soak = Soak(home, args.steps, random.Random(f"{args.seed}-{args.part}"))
    try:
        soak.inject_and_wait(args.faults)
        soak.check()
        soak.say_alerts(args.picture)
    except RuntimeError as error:
        soak.problems.append(str(error))
    finally:
        soak.close()
    soak.problems += left_processes(home)
    for problem in soak.problems:
        soak.say(f"PROBLEM: {problem}")
    RESULTS.mkdir(exist_ok=True)
    name = f"{args.seed}-{args.part:02}"
    result = {"seed": args.seed, "part": args.part, "steps": args.steps, **soak.result()}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=0) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.log").write_text("\n".join(soak.lines) + "\n", encoding="utf-8")
    if soak.problems:
        print(f"files are kept in {home}", file=sys.stderr)
    return 1 if soak.problems else 0


class Soak:
    """Submits runs to `gxpo up`, injects faults, and checks the runs."""

    def __init__(self, home: Path, steps: int, chance: random.Random) -> None:
        self.home, self._steps, self._chance, self._begun = home, steps, chance, time.monotonic()
        self.lines, self.problems = list[str](), list[str]()
        self.alerts: list[str] | None = None
        self.totals: Counter[str] = Counter()
        self._faults_done: list[tuple[Fault, Fault | None]] = []
        self._submitted: dict[str, str] = {}
        self._longest_step_s = 0.0
        self._reported_at = self._begun
        programs = find_programs()
        if programs is None:
            raise SystemExit(NOT_INSTALLED)
        with ExitStack() as stack:
            postgres = PostgresServer(programs)
            stack.callback(postgres.close)
            rewards = self._rewards = RewardServer()
            stack.callback(rewards.close)
            disk = Disk(home / "artifacts") if os.geteuid() == 0 else None
            if disk is None:
                self.say("not root: no disk is filled")
            else:
                stack.callback(disk.close)
            clocks, database = (Clock(home / "clock", "host"), Clock(home / "clock", "second")), postgres.create("gxpo")
            own = {"GXPO_DATABASE_URL": database, "GXPO_ALLOWED_REWARD_URLS": json.dumps([rewards.url])}
            # Another service of this machine would take the default port while the API is away.
            own["GXPO_PORT"] = str(free_port(random.SystemRandom().randrange(20_000, 30_000)))
            self._up = UpProcess(home, SERVICE | own | clocks[0].env)
            stack.callback(self._up.close)
            self.client = self._up.client
            watches = shutil.which("prometheus") is not None
            self._prometheus = Prometheus(home / "prometheus", self.client) if watches else None
            if self._prometheus is not None:
                stack.callback(self._prometheus.close)
            self._faults = Faults(
                self._up, chance, postgres=postgres, database=database, rewards=rewards, clocks=clocks, disk=disk
            )
            stack.callback(self._faults.close)
            self.close = stack.pop_all().close

    def say(self, text: str) -> None:
        self._reported_at = time.monotonic()
        line = f"{duration(time.monotonic() - self._begun):>14}  {text}"
        self.lines.append(line)
        print(line, flush=True)

    def submit(self) -> None:
        """Submit the next run."""
        number = len(self._submitted)
        name = list(KINDS)[number % len(KINDS)]
        kind = KINDS[name]
        rewards: list[dict[str, Any]] = [{"name": "correctness"}]
        if kind.get("http"):
            http = {"name": "http", "label": "judge", "url": self._rewards.url, "weight": 0.2}
            rewards.append(http | {"deadline_s": 5.0, "concurrency": 16})
        rollout = {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 64}
        config = {
            "seed": number,
            "model": {"path": "starter-tools" if "environment" in kind else "starter", "max_length": 224},
            "data": {"num_problems": 256},
            "rollout": rollout | kind.get("rollout", {}),
            "environment": kind.get("environment", {}),
            # Failures of the rewards are the faults of this benchmark.
            "verifier": {"rewards": rewards, "max_failed_fraction": 1.0},
            "evaluation": {"every_steps": 0, "samples_per_prompt": 2, "num_problems": 16, "at_start": False},
            "checkpoint": {"every_steps": 2},
            "placement": _HALF,
            "timeouts": TIMEOUTS,
            "learner": {"rule": {"name": ("grpo", "sfpo", "gxpo")[(number + number // len(KINDS)) % 3]}},
            "budget": {"steps": self._steps},
        }
        body = {"config": config, "name": f"soak {number}: {name}"}
        self._submitted[self.client.submit(body, key=f"soak-{number}")["id"]] = name

    # ---- faults -------------------------------------------------------------------------------------------------

    def inject_and_wait(self, num_faults: int) -> None:
        """Inject faults at random moments while runs execute, then wait for the last runs to end."""
        ended: set[str] = set()

        def step() -> bool:
            runs = self._up.runs()
            for run in runs:
                if run["state"] in ENDED and run["id"] not in ended:
                    ended.add(run["id"])
                    self.say(f"{run['name']}: {run['state']}, {run['recoveries']} recoveries")
            left = num_faults - len(self._faults_done)
            while left > 0 and len(self._submitted) - len(ended) < _WAITING:
                self.submit()
            if left > 0 and any(run["state"] == "running" for run in runs):
                time.sleep(self._chance.uniform(0, _LONGEST_WAIT_S))
                self._inject(pair=left > 1 and self._chance.random() < _PAIRS)
            if time.monotonic() - self._reported_at > STUCK_S:
                raise RuntimeError(f"nothing has happened for {STUCK_S / 60:g} minutes; {self.home} has the logs")
            return left <= 0 and len(ended) == len(self._submitted)

        self._up.until(step, "all runs to end", hang_s=math.inf)

    def _inject(self, *, pair: bool) -> None:
        """One fault or two at a time; returns once they are noticed and over."""
        first = self._faults.inject()
        if first is None:
            return
        faults = [first]
        if pair:
            time.sleep(self._chance.uniform(0, _LONGEST_GAP_S))
            second = self._faults.inject(besides=first.name)
            faults += [second] if second is not None else []
        pending = list(faults)
        while pending and time.monotonic() - first.begun < GIVE_UP_S:
            for fault in list(pending):
                with suppress(psutil.NoSuchProcess):
                    if fault.noticed_s is None and fault.noticed():
                        fault.noticed_s = time.monotonic() - fault.begun
                    if fault.noticed_s is not None and fault.over():
                        pending.remove(fault)
            time.sleep(0.2)
        for fault in faults:
            other = next((one for one in faults if one is not fault), None)
            self._faults_done.append((fault, other))
            bound, seconds = allowed_s(fault, other), fault.noticed_s
            after = "" if bound is None else f", noticed after {seconds or math.nan:.1f} s of {bound:g}"
            self.say(f"fault {len(self._faults_done)}: {fault.name}{after}{' (two at a time)' if other else ''}")
            if seconds is None or fault in pending or (bound is not None and seconds > bound):
                what = f"took {seconds:.1f} s" if seconds is not None else "was not noticed"
                self.problems.append(f"{fault.name} {what}; promised are {bound} s")
                self.say(f"PROBLEM: {self.problems[-1]}")

    # ---- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Add the problems of all runs and of what they left."""
        for run_id in self._submitted:
            self.problems += self._check_run(run_id)
        restarts = self.totals["processes restarted within runs"]
        names = [fault.name for fault, _ in self._faults_done]
        # With Ray both runs may notice the loss of each process first.
        lost = sum(
            name.startswith("actor ") or 6 * (name in ("ray's head lost", "host lost, a file cut")) for name in names
        )
        if restarts > lost:
            self.problems.append(f"{restarts} processes of runs were restarted, but only {lost} were killed or stopped")
        self.problems += self._check_idle()

    def _check_run(self, run_id: str) -> list[str]:
        run, folder = self.client.run(run_id), self.home / "artifacts" / run_id
        kind = KINDS[self._submitted[run_id]]
        if run["state"] != "succeeded":
            return [f"{run_id} is {run['state']}: {run['reason']} {run['detail']}"]
        rows, samples, events = read_metrics(folder), read_samples(folder), read_events(folder)
        self.totals.update({"runs": 1, "steps": len(rows), "samples": len(samples), "recoveries": run["recoveries"]})
        problems = []
        # Nothing lost, nothing doubled.
        if [row["step"] for row in rows] != list(range(1, self._steps + 1)):
            problems.append(f"steps on the disk are {[row['step'] for row in rows]}")
        if run["progress"]["steps"] != self._steps:
            problems.append(f"the service counts {run['progress']['steps']} steps of {self._steps}")
        for name in sorted({name for row in rows for name in row["metrics"]}):
            on_disk = {row["step"]: row["metrics"][name] for row in rows if name in row["metrics"]}
            curve = self.client.get("/runs", run_id, "metrics", names=name)["series"][name]
            stored = dict(zip(curve["steps"], map(decode_number, curve["y"]), strict=True))
            if len(stored) != len(curve["steps"]) or repr(sorted(stored.items())) != repr(sorted(on_disk.items())):
                problems.append(f"{name} is {stored} in the service and {on_disk} on the disk")
        answered = self.client.all_of("/runs", run_id, "samples")
        keys = [[(row["step"], row["group"], row["sample"]) for row in part] for part in (samples, answered)]
        if sorted(keys[0]) != sorted(keys[1]) or len(set(keys[0])) != 16 * self._steps:
            problems.append(
                f"{len(keys[0])} samples on the disk, {len(keys[1])} in the service, not {16 * self._steps}"
            )
        scores = [
            [(row["step"], row["benchmark"], repr(sorted(row["scores"].items()))) for row in part]
            for part in (read_evaluations(folder), self.client.evaluations(run_id))
        ]
        if scores[0] != scores[1] or [score[0] for score in scores[0]] != [self._steps]:
            problems.append(f"evaluations are {scores[0]} on the disk and {scores[1]} in the service")
        # Totals and times.
        last = rows[-1]["metrics"]
        for total, part in (
            ("update/backward_passes_total", "update/backward_passes"),
            ("time/training_s", "time/step_s"),
        ):
            if not math.isclose(last[total], sum(row["metrics"][part] for row in rows), rel_tol=1e-9):
                problems.append(f"{total} is {last[total]}, not the sum of its steps")
        slowest = max((row["metrics"] for row in rows), key=lambda metrics: metrics["time/step_s"])
        self._longest_step_s = max(self._longest_step_s, slowest["time/step_s"])
        if slowest["time/step_s"] >= TRAINER_STOPPED_S[0]:
            parts = ", ".join(f"{name} {slowest[name]:.1f}" for name in sorted(slowest) if name.startswith("time/"))
            problems.append(f"a step has a wait of a fault in its training time: {parts}")
        # Samples: weights as old as allowed, rewards of the server, conversations.
        depth = kind.get("rollout", {}).get("async_depth", 0)
        failed = 0
        for row in samples:
            behind = row["step"] - 1 - row["weights_version"]
            if not 0 <= behind <= depth:
                problems.append(f"step {row['step']} has a sample of weights that are {behind} versions old")
            if row["verdict"] in ("timeout", "error"):
                failed += 1
                if row["reward"] is not None or not row["detail"]:
                    problems.append(f"a failed verdict has a reward, or no reason: {row}")
            elif kind.get("http") and row["components"].get("judge") != judged(row["response"]):
                problems.append(f"the server gave {judged(row['response'])} for {row}")
            if ("environment" in kind) != bool(row.get("turns")):
                problems.append(f"a sample has the turns {row.get('turns')}")
        self.totals["verdicts lost with the reward server"] += failed
        # Each launch and restart has its fault.
        ends = sum(run_id in fault.ends for fault, _ in self._faults_done)
        if run["launch"] - 1 > ends:
            problems.append(f"launched {run['launch']} times, with {ends} faults that can end a launch")
        names = ("sampler_restarted", "verifier_restarted", "learner_died")
        self.totals["processes restarted within runs"] += sum(event["kind"] in names for event in events)
        return [f"{run_id} ({run['name']}): {problem}" for problem in problems]

    def _check_idle(self) -> list[str]:
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
        self.alerts = sorted(self._prometheus.fired())
        self.say(f"alerts that fired: {', '.join(self.alerts) or 'none'}")
        if picture is not None:
            self._prometheus.draw(picture)

    def result(self) -> dict[str, Any]:
        return {
            "minutes": round((time.monotonic() - self._begun) / 60, 1),
            "problems": self.problems,
            "totals": dict(self.totals),
            "longest step in s": round(self._longest_step_s, 2),
            "runs": dict(Counter(self._submitted.values())),
            "alerts": self.alerts,  # None: nobody watched
            "faults": [
                f"{fault.name} | {fault.bound_s} | {fault.noticed_s or 0.0:.1f} | {other.name if other else ''}"
                for fault, other in self._faults_done
            ],
        }


def allowed_s(fault: Fault, other: Fault | None) -> float | None:
    """Seconds in which a fault must be noticed, None where nothing is promised.

    other: of two at a time. Its outage does not count, and silence is counted from zero after it.
    """
    if fault.bound_s is None or other is None:
        return fault.bound_s
    return 2 * fault.bound_s + (other.bound_s or _UNBOUNDED_S)


def left_processes(home: Path) -> list[str]:
    """Processes of the service of a home that has been closed."""
    problems = []
    own = {
        os.getpid(),
        *(parent.pid for parent in psutil.Process().parents()),
    }  # which may have the home as an argument
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        words, env = process.info["cmdline"] or [], process.info["environ"] or {}
        if process.pid not in own and (env.get("GXPO_HOME") == str(home) or any(str(home) in word for word in words)):
            problems.append(f"process {process.pid} is left: {' '.join(words)[:200]}")
    return problems


def report(parts: Sequence[dict[str, Any]]) -> str:
    """The sum of all parts, as text."""
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    alone: dict[str, list[tuple[float, float]]] = defaultdict(list)
    times: Counter[str] = Counter()
    pairs = 0
    for part in parts:
        totals.update(part["totals"])
        kinds.update(part["runs"])
        for line in part["faults"]:
            name, bound, seconds, other = line.split(" | ")
            times[name] += 1
            pairs += bool(other)
            if not other and bound != "None":
                alone[name].append((float(seconds), float(bound)))
    problems = [problem for part in parts for problem in part["problems"]]
    watched = [part["alerts"] for part in parts if part["alerts"] is not None]
    fired = ", ".join(sorted({name for names in watched for name in names})) or "none"
    lines = [
        f"{times.total()} faults, {pairs} of them two at a time, in {len(parts)} parts and "
        f"{sum(part['minutes'] for part in parts):.0f} minutes: {len(problems)} problems",
        *(f"PROBLEM: {problem}" for problem in problems),
        "",
        *(f"{name}: {number}" for name, number in totals.items()),
        f"longest step, in seconds of training time: {max((part['longest step in s'] for part in parts), default=0):g}",
        f"alerts that fired in {number_of(len(watched), 'part')} that Prometheus watched: {fired}",
        "",
        *(f"{number:5} runs {name}" for name, number in kinds.most_common()),
        "",
        "times  noticed alone: median, longest, promised (s)   fault",
    ]
    for name, number in sorted(times.items(), key=lambda item: (-item[1], item[0])):
        row = f"{'–':>44}"
        if measured := alone[name]:
            seconds, bounds = [pair[0] for pair in measured], sorted({pair[1] for pair in measured})
            promised = "/".join(f"{bound:g}" for bound in bounds)
            row = f"{statistics.median(seconds):18.1f}{max(seconds):10.1f}{promised:>16}"
        lines.append(f"{number:5}{row}   {name}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
