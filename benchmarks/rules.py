"""What a rule costs: update times, extrapolation, sync, time in no named part, memory, time to the first step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Figure, median, ratio, save
from benchmarks.small_loop import small_loop
from benchmarks.step_time import WARM_UP, equal_work, run_ours
from gxpo_trainer.config import GxpoRule
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rules.contract import chunks, make_rule, snapshot
from gxpo_trainer.rules.predictors import Plan, extrapolate_by_ratio

WORK = {"prompts": 64, "group": 8, "new_tokens": 48, "steps": 10}
NAMED = ("rollout", "verify", "update", "sync")
RULES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "gxpo": {"name": "gxpo", "k": 5, "gate": {"mode": "never"}},
    "sfpo": {"name": "sfpo", "k": 5, "gate": {"mode": "never"}},
}


def extrapolation_seconds(num_elements: int, repeats: int = 20) -> list[float]:
    """Two snapshots and one fused pass over a flat fp32 shard of that size: the extra cost of GXPO."""
    generator = torch.Generator().manual_seed(0)
    theta, g0, g1 = (torch.randn(num_elements, generator=generator) for _ in range(3))
    theta0, probe = theta.clone(), g0.clone()
    plan = Plan.of(GxpoRule(k=5), 1e-8, trial=False)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        snapshot([theta], [theta0])
        snapshot([g0], [probe])
        for parts in chunks([theta], [theta0], [probe], [g1]):
            extrapolate_by_ratio(plan, *parts)
        seconds.append(time.perf_counter() - begin)
    return seconds


def first_step_seconds(root: Path, number: int) -> float:
    """Wall time of `gxpo train` from the command to its first step, caches warm."""
    run = root / "first.toml"
    run.write_text(
        'name = "first"\n[model]\nmax_length = 192\n[evaluation]\nat_start = false\nevery_steps = 0\nnum_problems = 8\n'
        "[budget]\nsteps = 1\n",
        encoding="utf-8",
    )
    begin = time.perf_counter()
    command = ["-m", "gxpo_trainer.cli", "train", str(run), "--out", str(root / f"first-{number}")]
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    duration, lines = float("nan"), []
    for line in process.stderr:
        lines.append(line)
        if "step 1/1" in line:
            duration = time.perf_counter() - begin
    if process.wait():
        raise RuntimeError("gxpo train failed:\n" + "".join(lines[-10:]))
    return duration


def update_seconds(rounds: int = 6) -> dict[str, list[float]]:
    """Seconds of an update, loading the batch included, by rule: all rules on the same batches, in turn.

    The order goes round from batch to batch, so that a machine that drifts hits every rule alike. The learner is this
    process, with all cores to itself while the sampler waits, as in a run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    with small_loop(equal_work(STARTER_FOLDER, WORK, "updates", RULES["grpo"])) as loop, loop.learner() as made:
        learner, batches = made
        for number in range(WARM_UP + rounds):
            batch = batches.next()
            for place in range(len(RULES)):
                name = list(RULES)[(number + place) % len(RULES)]
                rule = make_rule(equal_work(STARTER_FOLDER, WORK, name, RULES[name]).learner.rule)
                begin = time.perf_counter()
                learner.load_batches([batch])
                rule.step(learner)
                if number >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = {
            name: run_ours(equal_work(STARTER_FOLDER, WORK, name, RULES[name]), root / name)
            for name in ("grpo", "gxpo")
        }
        update = update_seconds()
        steps = [row["time/step_s"] for row in rows["grpo"]]
        sync = [row["time/sync_s"] / row["time/step_s"] for row in rows["grpo"]]
        unnamed = [1 - sum(row[f"time/{part}_s"] for part in NAMED) / row["time/step_s"] for row in rows["grpo"]]
        size = sum(p.numel() for p in _starter_parameters())
        added = extrapolation_seconds(size)
        figures: list[Figure] = [
            median("GRPO step", steps, "s"),
            *(median(f"{name} update", seconds, "s") for name, seconds in update.items()),
            median("GXPO update / GRPO update", quotients(update["gxpo"], update["grpo"]), "×", at_most=3.05),
            median("SFPO K=5 update / GRPO update", quotients(update["sfpo"], update["grpo"]), "×"),
            ratio("snapshot + extrapolation / GXPO update", added, update["gxpo"], at_most=0.03),
            median("sync, share of a GRPO step", sync, "", at_most=0.02),
            median("time in no named part, share of a GRPO step", unnamed, "", at_most=0.03),
            median(
                "verification not hidden by sampling, share of a GRPO step",
                [r["time/verify_s"] / r["time/step_s"] for r in rows["grpo"]],
                "",
                at_most=0.05,
            ),
            *(
                median(
                    f"peak memory of the {who} (GXPO)",
                    [r[f"system/{who}_peak_bytes"] / 2**20 for r in rows["gxpo"]],
                    "MiB",
                )
                for who in ("learner", "sampler")
            ),
            median(
                "first step of gxpo train", [first_step_seconds(root, number) for number in range(2)], "s", at_most=45
            ),
        ]
    save("rules", figures, {**WORK, "threads": threads, "parameters": size})


def quotients(left: list[float], right: list[float]) -> list[float]:
    """Batch by batch."""
    return [a / b for a, b in zip(left, right, strict=True)]


def _starter_parameters() -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(STARTER_FOLDER).parameters())


if __name__ == "__main__":
    main()
