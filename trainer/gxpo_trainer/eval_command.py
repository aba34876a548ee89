"""`gxpo eval`: score a transformers folder or a hub model on benchmarks, without a run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gxpo_trainer.config import RunConfig
from gxpo_trainer.engine.placement import Placement
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import plain
from gxpo_trainer.models.load import load_tokenizer, resolve_model
from gxpo_trainer.train import tokenized_benchmarks


def eval_command(args: argparse.Namespace) -> int:
    """Sample, grade, print a table; with --out also one JSON line a benchmark."""
    if not (args.temperature > 0 and math.isfinite(args.temperature)):
        raise ConfigError(f"--temperature {args.temperature}: must be above 0; pass@k needs samples that differ")
    config = _config(args)
    placement = Placement.decide(config)
    folder = resolve_model(config.model)
    benchmarks = tokenized_benchmarks(config, load_tokenizer(config.model))
    records = _evaluate(config, placement, folder, benchmarks, args.temperature)
    if args.out is not None:
        lines = [json.dumps(plain({"model": args.model, **record}), ensure_ascii=False) for record in records]
        Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    _print(records, args.samples)
    return 0


def _config(args: argparse.Namespace) -> RunConfig:
    """A run config that holds only what an evaluation needs."""
    longest = args.max_new_tokens or (48 if args.model == "starter" else 3072)
    body = {
        "name": "eval",
        "seed": args.seed,
        "model": {"path": args.model, "max_length": longest + 1024},
        "rollout": {"max_new_tokens": longest, "samples_per_prompt": max(2, args.samples)},
        "evaluation": {
            "benchmarks": list(args.benchmark),
            "samples_per_prompt": args.samples,
            "num_problems": args.problems,
            "max_new_tokens": longest,
        },
    }
    return RunConfig.model_validate(body)


def _evaluate(config: RunConfig, placement: Placement, folder: str, benchmarks: list, temperature: float) -> list[dict]:
    import ray

    from gxpo_trainer.engine.collect import SampleCollector
    from gxpo_trainer.engine.placement import start_ray
    from gxpo_trainer.evaluate import Evaluator

    ours = start_ray(placement)
    console = Console(stderr=True)

    def tell(kind: str, message: str, **_: object) -> None:
        console.print(f"eval: {kind}: {message}", markup=False)

    collector = SampleCollector(config, placement, folder, tell, initial_version=0)
    try:
        collector.start()
        evaluator = Evaluator(config, benchmarks)
        evaluator.sampling = replace(evaluator.sampling, temperature=temperature)
        with console.status("sampling and grading"):
            records, _ = evaluator.run(collector, step=0, version=0)
        return records
    finally:
        collector.kill()
        if ours:
            ray.shutdown()


def _print(records: list[dict], samples: int) -> None:
    table = Table(title=f"{samples} samples a problem, 95 % intervals")
    names = dict.fromkeys(["pass@1", f"pass@{samples}", f"maj@{samples}"])
    for column in ("benchmark", "problems", *names, "mean length", "truncated"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for record in records:
        scores = record["scores"]
        cells = [
            f"{scores[name]:.1%} [{scores[f'{name}/ci_low']:.1%}, {scores[f'{name}/ci_high']:.1%}]" for name in names
        ]
        ends = [f"{scores['length_mean']:.0f}", f"{scores['truncated_fraction']:.1%}"]
        table.add_row(record["benchmark"], str(record["num_problems"]), *cells, *ends)
    # A pipe has no width of its own, and rich would fold the intervals into 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(table)
