"""Two runs at once under `gxpo up` on two cores: on resources for one the second waits, on those for two both run.

    python -m benchmarks.concurrent_runs

Real engines. The scheduler may start two runs and counts more CPUs than the machine has, so that the runs wait for
Ray's resources, not in the queue of the service. Takes minutes and is not among the benchmarks of `make bench`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, save, single
from benchmarks.up_process import UpProcess
from gxpo_client.client import Json

SERVICE = {"GXPO_MAX_CONCURRENT_RUNS": "2", "GXPO_QUOTA_CPUS": "4"}
WHOLE = {"learner_cpus": 1.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25}
HALF = {"learner_cpus": 0.5, "sampler_cpus": 0.375, "verifier_cpus": 0.125}
STEPS = 12
ENDED = ("succeeded", "failed", "cancelled")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="gxpo-runs-", ignore_cleanup_errors=True) as folder:
        up = UpProcess(Path(folder), SERVICE)
        try:
            waiting, side_by_side = _two_runs(up, "whole", WHOLE), _two_runs(up, "half", HALF)
        finally:
            up.close()
    problems = [*_check(waiting, together=False), *_check(side_by_side, together=True)]
    for problem in problems:
        print(problem, file=sys.stderr)
    figures = [
        Figure("problems", len(problems), len(problems), len(problems), "", "0", not problems),
        *(single(f"resources for one, {what}", value, "s") for what, value in _spans(waiting)),
        *(single(f"resources for two, {what}", value, "s") for what, value in _spans(side_by_side)),
    ]
    save("concurrent_runs", figures, {"steps": STEPS, **SERVICE, "phases": [_phases(waiting), _phases(side_by_side)]})
    return 1 if problems else 0


Seen = dict[str, list[tuple[float, str, int]]]
"""By run: seconds since the submission, state or phase, and steps done, at each change."""


def _two_runs(up: UpProcess, name: str, placement: dict[str, float]) -> Seen:
    """Submit two equal runs and watch them until both have ended."""
    ids = [
        up.client.submit({"config": _config(n, placement), "name": f"{name} {n}"}, f"{name}-{n}")["id"] for n in (1, 2)
    ]
    begin = time.monotonic()
    seen: Seen = {run_id: [] for run_id in ids}

    def ended() -> bool:
        runs: list[Json] = [run for run in up.runs() if run["id"] in seen]
        for run in runs:
            phase_or_state = run["phase"] if run["state"] == "running" and run["phase"] else run["state"]
            entry = (time.monotonic() - begin, phase_or_state, run["progress"]["steps"])
            if not seen[run["id"]] or seen[run["id"]][-1][1:] != entry[1:]:
                seen[run["id"]].append(entry)
                print(f"{entry[0]:6.1f} s  {run['name']}: {phase_or_state}, step {entry[2]}", flush=True)
        return len(runs) == len(ids) and all(run["state"] in ENDED for run in runs)

    up.until(ended, "both runs to end")
    return seen


def _config(seed: int, placement: dict[str, float]) -> dict[str, Any]:
    return {
        "seed": seed,
        "model": {"max_length": 192},
        "data": {"num_problems": 256},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 48},
        "evaluation": {"every_steps": 0, "num_problems": 16, "at_start": False},
        "learner": {"rule": {"name": "gxpo"}},
        "budget": {"steps": STEPS},
        "placement": placement,
    }


def _check(seen: Seen, *, together: bool) -> list[str]:
    """Problems: a run that did not succeed, and runs that overlapped, or waited, against expectation."""
    problems = [
        f"{run_id} ended as {entries[-1][1]}" for run_id, entries in seen.items() if entries[-1][1] != "succeeded"
    ]
    waited = [run_id for run_id, entries in seen.items() if any(e[1].startswith("waiting for ") for e in entries)]
    if len(waited) != (0 if together else 1):
        problems.append(f"{len(waited)} runs waited for resources")
    (first, last), (other_first, other_last) = map(_training, seen.values())
    overlap = min(last, other_last) > max(first, other_first)
    if overlap != together:
        problems.append(f"the runs trained {'at the same time' if overlap else 'one after the other'}")
    return problems


def _training(entries: list[tuple[float, str, int]]) -> tuple[float, float]:
    """When a run was first seen with a step, and when it ended."""
    return next(at for at, _, steps in entries if steps), entries[-1][0]


def _spans(seen: Seen) -> list[tuple[str, float]]:
    return [
        (f"run {number} {what}", at)
        for number, entries in enumerate(seen.values(), 1)
        for what, at in zip(("first seen with a step", "ended"), _training(entries), strict=True)
    ]


def _phases(seen: Seen) -> list[list[str]]:
    """What each run showed, in order, without repetitions."""
    return [list(dict.fromkeys(name for _, name, _ in entries)) for entries in seen.values()]


if __name__ == "__main__":
    sys.exit(main())
