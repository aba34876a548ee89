"""Asynchronous rollouts: the two figures of sampler and learner on a core each, and utilization by depth.

    python -m benchmarks.async_rollouts [figures] [simulation]

`figures`: GXPO step / GRPO step, both one step ahead, and GXPO one step ahead / strict, where sampling takes at least
three times as long as GRPO's update. `simulation`: utilization for up to 512 engines from what one engine measures,
with its points of one and two engines held against runs. What depth costs in learning is a study's question:
studies/asynchronous-grpo.toml and asynchronous-gxpo.toml.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.async_simulation import Measured, Simulation
from benchmarks.measure import Figure, deviation, median, ratio, save
from gxpo_trainer.config import RunConfig
from gxpo_trainer.jsonl import read_lines
from gxpo_trainer.reporting.reading import SAMPLES, read_metrics
from gxpo_trainer.training.run import train_run

STEPS, WARM_UP = 14, 4
AT_ONCE = (16, 8)
"""Sequences at a time in the figures: few make sampling slow. It has to take 3 updates of GRPO; with 32 it took 2.3."""
ENGINES = (1, 2, 8, 64, 512)
RULES: dict[str, dict[str, Any]] = {
    "GRPO": {"name": "grpo"},
    "GXPO": {"name": "gxpo", "k": 5, "gate": {"mode": "never"}},
}


def config_of(
    rule: str, depth: int, *, samplers: int = 1, max_num_seqs: int = 32, in_flight: bool = False
) -> RunConfig:
    """One thread for the learner and for each engine. Few sequences at a time make sampling slow."""
    return RunConfig.model_validate(
        {
            "model": {"max_length": 256},
            "data": {"num_problems": 1024},
            "rollout": {
                "prompts_per_step": 16 * samplers,
                "samples_per_prompt": 8,
                "max_new_tokens": 64,
                "max_num_seqs": max_num_seqs,
                "async_depth": depth,
                "update_in_flight": in_flight,
            },
            "learner": {"rule": RULES[rule]},
            "evaluation": {"every_steps": 0, "num_problems": 8, "at_start": False},
            "checkpoint": {"every_steps": 0},
            "budget": {"steps": STEPS},
            "placement": {
                "samplers": samplers,
                "learner_threads": 1,
                "sampler_threads": 1,
                "learner_cpus": 0.3,
                "sampler_cpus": 0.3,
                "verifier_cpus": 0.2,
            },
        }
    )


def measure(config: RunConfig, folder: Path) -> dict[str, list[float]]:
    """Metrics of the steps after the warm-up, by name."""
    train_run(config, folder)
    rows = [row["metrics"] for row in read_metrics(folder)][WARM_UP:]
    return {name: [row[name] for row in rows if name in row] for name in {name for row in rows for name in row}}


def figures() -> None:
    step, results = "time/step_s", []
    for at_once in AT_ONCE:
        with tempfile.TemporaryDirectory() as root:

            def run(rule: str, depth: int, at_once: int = at_once, root: str = root) -> dict[str, list[float]]:
                return measure(config_of(rule, depth, max_num_seqs=at_once), Path(root) / f"{rule}-{depth}")

            grpo, ahead, gxpo_ahead, gxpo = run("GRPO", 0), run("GRPO", 1), run("GXPO", 1), run("GXPO", 0)
        where = f"{at_once} sequences at a time"
        results += [
            ratio(f"sampling / update of GRPO, strict, {where}", grpo["time/rollout_s"], grpo["time/update_s"],
                  at_least=3.0),
            median(f"GRPO step, one step ahead, {where}", ahead[step], "s"),
            median(f"GXPO step, one step ahead, {where}", gxpo_ahead[step], "s"),
            median(f"GXPO step, strict, {where}", gxpo[step], "s"),
            ratio(f"GXPO step / GRPO step, one step ahead, {where}", gxpo_ahead[step], ahead[step], at_most=1.15),
            ratio(f"GXPO, one step ahead / strict, {where}", gxpo_ahead[step], gxpo[step], at_most=0.75),
            ratio(f"update of GXPO, one step ahead / strict, {where}", gxpo_ahead["time/update_s"],
                  gxpo["time/update_s"]),
            median(f"overlap, GXPO one step ahead, {where}", gxpo_ahead["time/overlap_fraction"], ""),
        ]  # fmt: skip
    save("async_rollouts", results, {"steps": STEPS - WARM_UP, "samples": 128, "max_new_tokens": 64})


def simulation() -> None:
    with tempfile.TemporaryDirectory() as root:
        one = measure(config_of("GXPO", 0), Path(root) / "one")
        wide = measure(config_of("GXPO", 0, max_num_seqs=64), Path(root) / "wide")
        measured = fit(one, wide, Path(root) / "one")
        results: list[Figure] = []
        for name, samplers, depth in (("one engine, one step ahead", 1, 1), ("two engines, strict", 2, 0)):
            run = measure(config_of("GXPO", depth, samplers=samplers), Path(root) / f"{samplers}-{depth}")
            # Here the learner does not grow with the batch.
            alone = replace(measured, update_s=samplers * measured.update_s)
            predicted = Simulation(alone, samplers, depth).run(60).step_s
            results.append(
                deviation(f"|simulated / measured step − 1|, {name}", predicted, run["time/step_s"], at_most=0.3)
            )
    save("async_simulation", results, {"base_s": measured.base_s, "sequence_s": measured.sequence_s})
    print_table(measured)


def fit(narrow: dict[str, list[float]], wide: dict[str, list[float]], folder: Path) -> Measured:
    """Times of one engine from two runs with 32 and 64 sequences at a time, and the lengths of the first's samples."""
    lengths = [int(row["length"]) for row in read_lines(folder / SAMPLES)]
    update_s, sync_s = (float(np.median(narrow[f"time/{part}_s"])) for part in ("update", "sync"))
    seconds = [float(np.median(run["time/rollout_s"])) for run in (narrow, wide)]

    def sampling_s(base_s: float, sequence_s: float, at_once: int) -> float:
        part = Measured(base_s, sequence_s, 0.0, 0.0, lengths, (0.0,), 16, 8, at_once)
        return Simulation(part, 1, 0).run(12).step_s

    # Sampling is linear in both constants: two runs, two unknowns.
    table = [[sampling_s(1.0, 0.0, at_once), sampling_s(0.0, 1.0, at_once)] for at_once in (32, 64)]
    base_s, sequence_s = np.maximum(np.linalg.lstsq(np.array(table), np.array(seconds), rcond=None)[0], 1e-6)
    verify_s = narrow["time/verify_s"]
    return Measured(float(base_s), float(sequence_s), update_s, sync_s, lengths, verify_s, 16, 8, 32)


def print_table(measured: Measured) -> None:
    """Utilization by engines and depth; in flight where it says so."""
    print("  engines  depth  in flight  step (s)  engines busy  learner busy  staleness")
    for engines in ENGINES:
        for depth, in_flight in ((0, False), (1, False), (1, True), (2, False), (2, True)):
            usage = Simulation(measured, engines, depth, in_flight=in_flight).run(12)
            print(
                f"  {engines:7d}  {depth:5d}  {'yes' if in_flight else 'no':>9}  {usage.step_s:8.2f}  "
                f"{usage.engines:12.0%}  {usage.learner:12.0%}  {usage.staleness:9.2f}"
            )


PARTS = {"figures": figures, "simulation": simulation}


def main(parts: Sequence[str] = ("figures", "simulation")) -> None:
    for part in parts:
        PARTS[part]()


if __name__ == "__main__":
    main(sys.argv[1:] or ("figures", "simulation"))
