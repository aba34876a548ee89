"""Whether `arithmetic_skill` needs skill: what its starter policy, fixed modes, supervised training and a run reach.

    python -m benchmarks.skill_task --policy DIR [--problems 512] [--supervised-steps 600] [--run RUN]

It does where the policy often finds a right answer among several, where no fixed way to answer beats the policy's own,
and where the worked answers to a run's own problems teach more than the run. Fixed modes: each frequent first token
forbidden, and each beginning of FORCED. A lower temperature is no mode of answering and is shown apart. Held-out
problems, 8 samples each at temperature 1, scored by the product's grader; intervals are 95% over problems. `--policy`
is a folder that tools/starter_skill.py wrote, `--run` one of `gxpo train` with that policy, `data.source` =
`arithmetic_skill` and 300 passes; on a quiet machine it also tells what they cost.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.first_token import graded
from benchmarks.measure import Figure, mean, save, single
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.benchmarks import HELD_OUT_SEED
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.reporting.reading import read_evaluations
from gxpo_trainer.types import Prompt
from tools.starter import Row, conversation_row, prompt_ids, train

SAMPLES = 8
FREQUENT = 0.02
"""Mean probability from which a first token is frequent."""
FORCED = ("\\boxed{", "so \\boxed{", "=")
BATCH, RATE = 32, 0.005
"""Of the supervised training."""


def frequent_tokens(model: Any, tokenizer: Any, texts: list[str]) -> list[int]:
    """First tokens of answers with a mean probability of at least FREQUENT."""
    with torch.inference_mode():
        ids = [torch.tensor([row]) for row in prompt_ids(tokenizer, texts)]
        mean = torch.stack([model(input_ids=row).logits[0, -1].softmax(-1) for row in ids]).mean(0)
    return [int(token) for token in torch.nonzero(mean >= FREQUENT)]


def mode_figures(model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[Figure]:
    """Accuracy as it is, at best of 8, of every fixed mode, and at other temperatures; gains paired by problem."""
    own = graded(model, tokenizer, prompts, SAMPLES)
    spread = own.max(axis=1) - own.mean(axis=1)
    figures = [
        mean("untrained, pass@1", own.mean(axis=1)),
        mean(f"untrained, pass@{SAMPLES}", own.max(axis=1)),
        mean(f"pass@{SAMPLES} − pass@1", spread, at_least=0.3),
    ]
    frequent = frequent_tokens(model, tokenizer, [prompt.text for prompt in prompts[:64]])
    modes: list[dict[str, Any]] = [{"forbidden": token} for token in frequent] + [{"forced": text} for text in FORCED]
    gains = []
    for mode in modes:
        gain = graded(model, tokenizer, prompts, SAMPLES, **mode).mean(axis=1) - own.mean(axis=1)
        ((kind, what),) = mode.items()
        gains.append(mean(f"gain, {kind} {tokenizer.decode([what]) if kind == 'forbidden' else what!r}", gain))
    best = max(gains, key=lambda figure: figure.value)
    met = best.value < 0.02
    figures += [*gains, Figure(f"best mode: {best.name}", best.value, best.low, best.high, "", "< 0.02", met)]
    for temperature, samples in ((0.5, SAMPLES), (0.0, 1)):
        colder = graded(model, tokenizer, prompts, samples, temperature=temperature).mean(axis=1)
        figures.append(mean(f"gain, temperature {temperature:g}", colder - own.mean(axis=1)))
    return figures


def supervised(model: Any, tokenizer: Any, problems: list[Prompt], steps: int) -> None:
    """Train on the worked answers of the problems, epoch after epoch in random order."""
    prompts = prompt_ids(tokenizer, [problem.text for problem in problems])
    rows = [conversation_row(tokenizer, ids, [p.completion or ""]) for ids, p in zip(prompts, problems, strict=True)]

    def batches() -> Iterator[list[Row]]:
        rng, order = random.Random(0), list[Row]()
        for _ in range(steps):
            if len(order) < BATCH:
                order = rng.sample(rows, len(rows))
            yield [order.pop() for _ in range(BATCH)]

    for _ in train(model, batches(), steps, RATE, tokenizer.pad_token_id):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skill_task")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--supervised-steps", type=int, default=600, help=f"batches of {BATCH}; 0: none")
    parser.add_argument("--run", type=Path, help="folder of a run on the task")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    model: Any = AutoModelForCausalLM.from_pretrained(args.policy)
    held_out = generate("heldout", args.problems, HELD_OUT_SEED, ("long",))
    figures = mode_figures(model, tokenizer, held_out)
    ceiling = np.nan
    if args.supervised_steps:
        config = RunConfig()
        trained = generate("train", config.data.num_problems, config.seed, ("long",))
        supervised(model, tokenizer, trained, args.supervised_steps)
        reached = mean(
            f"supervised, {args.supervised_steps} batches of {BATCH}",
            graded(model, tokenizer, held_out, SAMPLES).mean(axis=1),
        )
        figures.append(reached)
        ceiling = reached.value
    if args.run is not None:
        for row in read_evaluations(args.run):
            scores, passes = row["scores"], row["backward_passes_total"]
            low, high = scores["pass@1/ci_low"], scores["pass@1/ci_high"]
            figures.append(Figure(f"run, {passes:g} passes", scores["pass@1"], low, high, ""))
        above = ceiling - scores["pass@1"]
        figures.append(Figure("supervised − run's last", above, None, None, "", "≥ 0.1", bool(above >= 0.1)))
        figures.append(single("run, training time with sampling", row["training_s"] / 60, "min", at_most=12))
    save("skill_task", figures, {"problems": args.problems, "samples": SAMPLES, "supervised_batch": BATCH})


if __name__ == "__main__":
    main()
