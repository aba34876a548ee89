"""A trainer without a policy: the product's lock, files, uploader and outcome around steps that only wait.

Used by the tests of chaos and of the demo in place of `gxpo train CONFIG --out DIR --continue --service FILE`. Every
number that it reports is a function of the step, so that a history can be checked whatever happened on the way.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from gxpo_trainer.jsonl import write_json
from gxpo_trainer.reporting.reading import read_identity
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.uploader import take_service
from gxpo_trainer.training.launch import Launch

PASSES_PER_STEP = 3
STEP_S = 0.1
CHECKPOINT_STEPS = 4
EVALUATION_STEPS = 5


def metrics_at(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 100,
        "update/grad_norm": float("nan") if step % 7 == 0 else 1.0 / step,
        "update/backward_passes_total": float(PASSES_PER_STEP * step),
        "rollout/tokens_total": 1000.0 * step,
        "time/training_s": step * STEP_S,
    } | ({"eval/average/pass@1": step / 200} if step % EVALUATION_STEPS == 0 else {})


def evaluation_at(step: int) -> dict[str, Any]:
    costs = ("update/backward_passes_total", "time/training_s", "rollout/tokens_total")
    spent = {name.split("/")[1]: metrics_at(step)[name] for name in costs}
    return {"benchmark": "word_problems", "scores": {"pass@1": step / 200}, "num_problems": 8, **spent}


def train(out: Path, config: dict[str, Any], launch: Launch) -> str:
    """Train from the latest checkpoint to the last step, or to a pause or cancel request; returns the outcome."""
    checkpoints = sorted((out / "checkpoints").glob("step-*.json"))
    resumed = int(checkpoints[-1].stem.removeprefix("step-")) if checkpoints else 0
    past = read_identity(out)["attempts"] if (out / "run.json").exists() else []
    with RunReporter(out) as reporter:
        reporter.start_attempt(len(past) + 1, resumed)
        reporter.write_identity({"config": config}, len(past) + 1)
        launch.begin(reporter)
        budget = config["budget"]
        last = budget.get("steps") or budget["backward_passes"] // PASSES_PER_STEP
        for step in range(resumed + 1, last + 1):
            request = launch.control_request()
            if request == "pause":
                save(out, step - 1, reporter)
            if request is not None:
                return request
            time.sleep(STEP_S)
            print(f"step {step} done", flush=True)
            reporter.log_metrics(step, metrics_at(step))
            if step % EVALUATION_STEPS == 0:
                reporter.log_evaluation(step, evaluation_at(step))
            if step % CHECKPOINT_STEPS == 0:
                save(out, step, reporter)
    return "steps" if budget.get("steps") else "backward_passes"


def save(out: Path, step: int, reporter: RunReporter) -> None:
    reporter.sync()
    if step > 0:
        (out / "checkpoints").mkdir(exist_ok=True)
        write_json(out / "checkpoints" / f"step-{step:06d}.json", {"step": step})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--continue", action="store_true", required=True)
    parser.add_argument("--service", type=Path, required=True)
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text(encoding="utf-8"))
    with Launch(args.out, take_service(args.service)) as launch:
        launch.end(train(args.out, config, launch))
    return launch.exit_code


if __name__ == "__main__":
    sys.exit(main())
