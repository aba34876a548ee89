"""Step time of GRPO against TRL's GRPOTrainer at equal work: same policy, prompts, samples, tokens, threads; and of
supervised fine-tuning against its SFTTrainer on the same rows.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import median, ratio, save
from benchmarks.policies import ten_million, three_million
from benchmarks.trl_peer import spread
from gxpo_trainer.config import DataConfig, ModelConfig, RunConfig
from gxpo_trainer.config.tasks import TEMPLATES, RewardConfig
from gxpo_trainer.data.prompts import TokenizedPrompts, load_prompts, tokenize_completions, tokenize_prompts
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.grading.rewards import RewardInput
from gxpo_trainer.learner.models import STARTER_FOLDER, load_tokenizer
from gxpo_trainer.reporting.reading import read_metrics
from gxpo_trainer.training.run import train_run

WARM_UP = 2
"""Warm-up steps excluded on both sides."""
EQUAL = "reward/zero_variance_fraction"


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


class Spread:
    """`spread` as a reward component."""

    def __call__(self, sample: RewardInput) -> float:
        return spread(sample.response)


def run_ours(config: RunConfig, out: Path) -> list[dict[str, float]]:
    """Metrics of each counted step of a run of the product; `step_s`: from the end of the step before to its own."""
    train_run(config, out)
    rows = [row for row in read_metrics(out) if "time/step_s" in row["metrics"]][WARM_UP - 1 :]
    return [{**row["metrics"], "step_s": row["time"] - last["time"]} for last, row in itertools.pairwise(rows)]


def time_trl(settings: dict[str, Any], out: Path) -> list[float]:
    """Seconds of each counted step of the peer with these settings; see trl_peer.py."""
    settings = {**settings, "threads": os.cpu_count()}
    given, result = out.with_suffix(".in.json"), out.with_suffix(".out.json")
    given.write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_peer", str(given), str(result)], check=True, stdout=subprocess.DEVNULL
    )
    seconds: list[float] = json.loads(result.read_text(encoding="utf-8"))["seconds"]
    return seconds[WARM_UP:]


def compare(
    name: str, config: RunConfig, peer: dict[str, Any], goal: float, rounds: int, root: Path, work: dict[str, Any]
) -> None:
    """Run gxpo and the peer alternately, `rounds` times; report the ratio of the median step times. peer: settings of
    trl_peer.py."""
    ours: list[float] = []
    theirs: list[float] = []
    equal: list[float] = []
    for number in range(rounds):
        rows = run_ours(config, root / f"{name}-{number}")
        ours += [row["step_s"] for row in rows]
        equal += [row[EQUAL] for row in rows if EQUAL in row]
        theirs += time_trl({**peer, "steps": config.budget.steps}, root / f"{name}-trl-{number}")
    figures = [
        median("gxpo step", ours, "s"),
        median("TRL step", theirs, "s"),
        ratio("gxpo / TRL", ours, theirs, at_most=goal),
    ]
    if equal:
        figures.append(median("groups without a gradient, which gxpo's backward pass leaves out", equal, "of 1"))
    save(name, figures, {**work, "rounds": rounds, "warm_up_steps": WARM_UP, "peer": "see trl_peer.py"})


def compare_grpo(
    name: str, policy: Path, work: dict[str, Any], goal: float, rounds: int, root: Path, *, random: bool
) -> None:
    """Steps of GRPO. random: the policy's weights are, so that both sides are rewarded by `spread`."""
    config = equal_work(policy, work, name, {"name": "grpo"})
    if random:
        verifier = config.verifier.model_copy(update={"rewards": (RewardConfig(name="benchmarks.step_time:Spread"),)})
        config = config.model_copy(update={"verifier": verifier})
    problems = [
        {"prompt": [{"role": "user", "content": item.text}], "gold": item.gold} for item in generate("train", 4096, 0)
    ]
    peer = {**work, "policy": str(policy), "problems": problems, "spread": random}
    compare(name, config, peer, goal, rounds, root, work)


def compare_supervised(num_rows: int, steps: int, goal: float, rounds: int, root: Path) -> None:
    """Supervised steps on all of so many worked answers, so that each step of either side has the same tokens."""
    rows = tokenized_rows(num_rows)
    pairs = list(zip(rows.token_ids, rows.completion_ids, strict=True))
    tokenized = [
        {"input_ids": [*map(int, p), *map(int, c)], "completion_mask": [0] * len(p) + [1] * len(c)} for p, c in pairs
    ]
    work = {"prompts": num_rows, "group": 2, "new_tokens": 48, "steps": steps}
    config = equal_work(STARTER_FOLDER, work, "sft", {"name": "grpo"})
    rollout = config.rollout.model_copy(update={"source": "dataset"})
    data = config.data.model_copy(update={"num_problems": num_rows})
    model = config.model.model_copy(update={"max_length": 1024})
    config = config.model_copy(update={"rollout": rollout, "data": data, "model": model})
    tokens = sum(len(row["input_ids"]) for row in tokenized)
    about = {"rows": num_rows, "tokens": tokens, "steps": steps}
    compare("step_time_sft", config, {"policy": str(STARTER_FOLDER), "rows": tokenized}, goal, rounds, root, about)


def tokenized_rows(num_rows: int) -> TokenizedPrompts:
    """Worked answers of the embedded task, as a run tokenizes them."""
    tokenizer = load_tokenizer(ModelConfig())
    rows = load_prompts(DataConfig(num_problems=num_rows), 0, completions=True).prompts
    return tokenize_completions(tokenize_prompts(rows, tokenizer, TEMPLATES["plain"], 1024), tokenizer, 1024)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        small = {"prompts": 64, "group": 8, "new_tokens": 48, "steps": 10}
        compare_grpo("step_time_starter", STARTER_FOLDER, small, 0.75, 2, root, random=False)
        medium = {"prompts": 24, "group": 12, "new_tokens": 96, "steps": 6}
        compare_grpo("step_time_3m", three_million(root / "policy-3m"), medium, 0.5, 1, root, random=True)
        large = {"prompts": 32, "group": 8, "new_tokens": 256, "steps": 4}
        compare_grpo("step_time_10m", ten_million(root / "policy-10m"), large, 0.3, 1, root, random=True)
        compare_supervised(256, 12, 0.8, 2, root)


if __name__ == "__main__":
    main()
