"""Implementation of `gxpo eval`: evaluate a transformers folder, an adapter or a hub model on benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, STARTER_POLICIES
from gxpo_trainer.config.io import build
from gxpo_trainer.environments.host import check_environment
from gxpo_trainer.errors import ConfigError, DataError
from gxpo_trainer.jsonl import plain, read_lines
from gxpo_trainer.learner.models import check_tensor_parallel, load_tokenizer, resolve_model
from gxpo_trainer.learner.policies import base_of, is_adapter, merge_adapter
from gxpo_trainer.reporting.identity import hash_path
from gxpo_trainer.reporting.tables import difference_table, published_table, scores_table, show
from gxpo_trainer.rollout.requests import EpisodeStart
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.training.prepare import check_conversations, tokenized_benchmarks


def evaluate_model(args: argparse.Namespace) -> int:
    """Sample, grade and print tables; with --out also write one JSON line per benchmark."""
    if not LOWEST_TEMPERATURE <= args.temperature <= HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"--temperature {args.temperature}: must be from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}; "
            "pass@k needs distinct samples"
        )
    earlier = None if args.against is None else _earlier(args.against)
    with _merged_model(args.model) as path:
        config = _config(args, path)
        placement = Placement.decide(config)
        folder = resolve_model(config.model)
        check_tensor_parallel(Path(folder), config.placement.tensor_parallel)
        tokenizer = load_tokenizer(config.model)
        check_conversations(config, tokenizer)
        benchmarks = tokenized_benchmarks(config, tokenizer)
        first = benchmarks[0].benchmark
        start = EpisodeStart.of(first.prompts[0], first.template, config.seed)
        check_environment(config.environment, start.problem, start.seed)
        found = _evaluate(config, placement, folder, benchmarks, args.temperature)
        records = [{**_identity(args.model, folder), **record} for record in found]
    if args.out is not None:
        lines = [json.dumps(plain(record), ensure_ascii=False) for record in records]
        Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    show(scores_table(records, args.samples))
    if earlier is not None:
        show(difference_table(records, earlier))
    if args.compare_published:
        table = published_table(records, args.model)
        if table is not None:
            show(table)
        else:
            Console(stderr=True).print("eval: no published numbers of these benchmarks", markup=False)
    return 0


@contextlib.contextmanager
def _merged_model(model: str) -> Iterator[str]:
    """The model to load; an adapter is merged into its base in a temporary folder."""
    folder = Path(model).expanduser()
    if not is_adapter(folder):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="gxpo-eval-") as temporary:
        merge_adapter(folder, Path(temporary) / "model")
        yield str(Path(temporary) / "model")


def _identity(model: str, folder: str) -> dict[str, Any]:
    """Name and hash of the evaluated model; of an adapter also the hash of its base."""
    given = Path(model).expanduser()
    if is_adapter(given):
        base = Path(base_of(given))
        base_sha256 = hash_path(base) if base.is_dir() else None
        return {"model": model, "policy_sha256": hash_path(given), "base_sha256": base_sha256}
    return {"model": model, "policy_sha256": hash_path(Path(folder)) if Path(folder).is_dir() else None}


def _earlier(path: Path) -> list[dict[str, Any]]:
    """Records of an earlier --out file, or of a run's evaluations.jsonl. Raises DataError."""
    if not path.is_file():
        raise DataError(f"--against {path}: the file does not exist; give one written by --out")
    records = list(read_lines(path))
    if not records or any("benchmark" not in record or "scores" not in record for record in records):
        raise DataError(f"--against {path}: contains no evaluations; give a file written by --out")
    return records


def _config(args: argparse.Namespace, model: str) -> RunConfig:
    """A run config with the settings of the evaluation. Raises ConfigError."""
    max_new_tokens = args.max_new_tokens or (48 if args.model in STARTER_POLICIES else 3072)

    def with_length(max_length: int) -> RunConfig:
        body = {
            "name": "eval",
            "seed": args.seed,
            "model": {"path": model, "max_length": max_length},
            "rollout": {"max_new_tokens": max_new_tokens, "samples_per_prompt": max(2, args.samples)},
            "evaluation": {
                "benchmarks": list(args.benchmark),
                "data_root": None if args.data_root is None else str(args.data_root),
                "template": args.template,
                "samples_per_prompt": args.samples,
                "num_problems": args.problems,
                "max_new_tokens": max_new_tokens,
            },
        }
        return build(body, args.set, source="gxpo eval")

    # What the environment may write is known once its settings are.
    observed = with_length(2**31).environment.observation_tokens
    config = with_length(max_new_tokens + observed + 1024)
    return config.model_copy(update={"placement": config.placement.model_copy(update={"learner_ranks": 0})})


def _evaluate(
    config: RunConfig, placement: Placement, folder: str, benchmarks: list[Any], temperature: float
) -> list[dict[str, Any]]:
    import ray

    from gxpo_trainer.rollout.pool import RolloutPool
    from gxpo_trainer.runtime.ray_session import start_ray
    from gxpo_trainer.training.evaluation import Evaluator

    owns_ray = start_ray(placement)
    console = Console(stderr=True)

    def log_event(kind: str, message: str, **_: object) -> None:
        console.print(f"eval: {kind}: {message}", markup=False)

    pool = RolloutPool(config, placement, folder, log_event, initial_version=0)
    try:
        pool.start()
        evaluator = Evaluator(config, benchmarks)
        evaluator.sampling = replace(evaluator.sampling, temperature=temperature)
        with console.status("sampling and grading"):
            records, _ = evaluator.run(pool, step=0, version=0)
        return records
    finally:
        pool.kill()
        placement.group.remove()
        if owns_ray:
            ray.shutdown()
