"""The peer: TRL's GRPOTrainer with the same policy, prompts, samples and token counts, in a separate process; or its
SFTTrainer, where the settings hold tokenized `rows`.

    python -m benchmarks.trl_peer SETTINGS.json OUT.json

Relevant settings of the peer: transformers generation, one optimizer step per batch (num_iterations 1), beta 0, fp32,
no padding-free packing, all cores for torch, one batch of all samples.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def spread(text: str) -> float:
    """A reward that differs within groups whatever the policy: one of random weights has no right answers, and gxpo
    leaves out the backward pass of a group of equal rewards, which the peer computes."""
    return len(text) % 8 / 7


def main(settings_file: str, out_file: str) -> None:
    """Train `steps` steps; write seconds and completion tokens of each."""
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    from gxpo_trainer.grading.verify import verify

    tokenizer = AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    rows = settings.get("rows")
    samples = len(rows) if rows else settings["prompts"] * settings["group"]
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float | None]:
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        if settings["spread"]:
            return [*map(spread, texts)]
        return [verify(g, text).reward or 0.0 for g, text in zip(gold, texts, strict=True)]

    common: dict[str, Any] = {
        "output_dir": str(Path(out_file).with_suffix(".trl")),
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-5,
        "max_steps": settings["steps"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "seed": 0,
    }
    if rows:
        trainer: Any = SFTTrainer(
            model=model,
            args=SFTConfig(**common, completion_only_loss=True, max_length=None),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
    else:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                **common,
                num_generations=settings["group"],
                max_completion_length=settings["new_tokens"],
                generation_kwargs={"min_new_tokens": settings["new_tokens"]},
                temperature=1.0,
                beta=0.0,
            ),
            train_dataset=Dataset.from_list(settings["problems"]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
    trainer.train()
    # Start of a step to the start of the next: generation, scoring, loss, backward, optimizer.
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    tokens = sum(len(row["input_ids"]) for row in rows) if rows else samples * settings["new_tokens"]
    Path(out_file).write_text(json.dumps({"seconds": seconds, "tokens": tokens}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
