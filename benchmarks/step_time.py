"""Step time of GRPO against TRL's GRPOTrainer at equal work: same policy, prompts, samples, tokens, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import median, ratio, save
from benchmarks.policies import ten_million, three_million
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.reporting.reading import read_metrics
from gxpo_trainer.training.run import train_run

WARM_UP = 2
"""Warm-up steps excluded on both sides."""


def equal_work(policy: Path, work: dict[str, Any], name: str, rule: dict[str, Any]) -> RunConfig:
    """Config of a run with fixed work per step, without evaluations or checkpoints."""
    return RunConfig.model_validate(
        {
            "name": name,
            "model": {"path": str(policy), "max_length": work["new_tokens"] + 96},
            "rollout": {
                "prompts_per_step": work["prompts"],
                "samples_per_prompt": work["group"],
                "max_new_tokens": work["new_tokens"],
                "ignore_eos": True,
            },
            "learner": {"rule": rule, "optimizer": {"learning_rate": 1e-5}},
            "evaluation": {"benchmarks": [], "every_steps": 0, "at_start": False},
            "checkpoint": {"every_steps": 0},
            "budget": {"steps": work["steps"]},
        }
    )


def run_ours(policy: Path, work: dict[str, Any], out: Path, rule: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of each counted step of a run of the product at the given work."""
    train_run(equal_work(policy, work, out.name, rule), out)
    return [row["metrics"] for row in read_metrics(out) if row["step"] > WARM_UP and "time/step_s" in row["metrics"]]


def run_trl(policy: Path, work: dict[str, Any], out: Path) -> list[float]:
    """Seconds of each counted step of the peer, run in a separate process."""
    problems = [
        {"prompt": [{"role": "user", "content": item.prompt.text}], "gold": item.prompt.gold}
        for item in generate("train", 4096, 0)
    ]
    settings = {**work, "policy": str(policy), "threads": os.cpu_count(), "problems": problems}
    given, result = out.with_suffix(".in.json"), out.with_suffix(".out.json")
    given.write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_peer", str(given), str(result)], check=True, stdout=subprocess.DEVNULL
    )
    seconds: list[float] = json.loads(result.read_text(encoding="utf-8"))["seconds"]
    return seconds[WARM_UP:]


def compare(name: str, policy: Path, work: dict[str, Any], goal: float, rounds: int, root: Path) -> None:
    """Run gxpo and the peer alternately, `rounds` times; report the ratio of the median step times."""
    ours: list[float] = []
    peer: list[float] = []
    for number in range(rounds):
        rows = run_ours(policy, work, root / f"{name}-{number}", {"name": "grpo"})
        ours += [row["time/step_s"] for row in rows]
        peer += run_trl(policy, work, root / f"{name}-trl-{number}")
    figures = [
        median("gxpo step", ours, "s"),
        median("TRL step", peer, "s"),
        ratio("gxpo / TRL", ours, peer, at_most=goal),
    ]
    save(
        name, figures, {**work, "rounds": rounds, "warm_up_steps": WARM_UP, "peer": "trl GRPOTrainer, see trl_peer.py"}
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        small = {"prompts": 64, "group": 8, "new_tokens": 48, "steps": 10}
        compare("step_time_starter", STARTER_FOLDER, small, 0.75, 2, root)
        medium = {"prompts": 24, "group": 12, "new_tokens": 96, "steps": 6}
        compare("step_time_3m", three_million(root / "policy-3m"), medium, 0.5, 1, root)
        large = {"prompts": 32, "group": 8, "new_tokens": 256, "steps": 4}
        compare("step_time_10m", ten_million(root / "policy-10m"), large, 0.3, 1, root)


if __name__ == "__main__":
    main()
