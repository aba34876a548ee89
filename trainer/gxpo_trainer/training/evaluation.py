"""Benchmarks during a run, on its sampler, and `gxpo eval` of a transformers folder or a hub model.

n responses per problem: pass@1 is their mean, pass@k the unbiased estimator, maj@n that of the majority's answer; 95%
intervals are Wilson's, over problems.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gxpo_trainer import __version__
from gxpo_trainer.algo.passk import majority_at_n, pass_at_k, proportion_interval
from gxpo_trainer.config import EvaluationConfig, RunConfig
from gxpo_trainer.config.base import MOST_TOKENS
from gxpo_trainer.config.engines import STARTER_TOKENS
from gxpo_trainer.config.io import build
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import check_output, plain
from gxpo_trainer.learner.models import config_json, load_tokenizer, resolve_model
from gxpo_trainer.planner.architectures import check_heads, language_model, positions
from gxpo_trainer.reporting.identity import hash_path
from gxpo_trainer.reporting.tables import show_scores
from gxpo_trainer.rollout.pool import RolloutPool, build_pool
from gxpo_trainer.rollout.sources import RolloutSource, request_seed
from gxpo_trainer.rollout.vllm_driver import EpisodeStart, SampleRequest, SamplingSettings
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import ray_session
from gxpo_trainer.training.prepare import (
    TokenizedBenchmark,
    check_conversations,
    check_tokens,
    first_messages,
    tokenized_benchmarks,
)
from gxpo_trainer.types import Metrics, ScoredGroup

_PROMPT = 1024
"""Tokens for a prompt where the model has the positions."""
_RECORDED = {"name", "max_turns", "max_observation_tokens"}
"""Settings of the environment in a record."""


class Evaluator:
    """Runs the configured benchmarks and turns verdicts into scores."""

    def __init__(self, config: RunConfig, benchmarks: Sequence[TokenizedBenchmark]) -> None:
        self.config = config
        self._multi_turn = config.environment.multi_turn
        self.benchmarks = benchmarks
        evaluation = config.evaluation
        limit = evaluation.max_new_tokens or config.rollout.max_new_tokens
        shaped = {name: getattr(evaluation, name) for name in ("top_p", "top_k", "min_p", "stop")}
        self.sampling = SamplingSettings(limit, evaluation.temperature, **shaped)
        self._recorded = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in shaped.items()
            if value != EvaluationConfig.model_fields[name].default
        }

    def run(
        self, collector: RolloutPool | RolloutSource, *, version: int, full: bool = False
    ) -> tuple[list[dict[str, Any]], Metrics]:
        """All benchmarks by the weights of `version`: records for evaluations.jsonl, and `eval/…` metrics.

        full: also the problems beyond `evaluation.num_problems`. Records and their metrics stay those of the subset,
        so that they can be compared along the run; `eval/<benchmark>/full/…` are of all problems.
        """
        records = []
        metrics: Metrics = {}
        for tokenized in self.benchmarks:
            name = tokenized.benchmark.name
            groups = self._sample(collector, tokenized, version, full=full)
            record = self._record(tokenized, groups[: len(tokenized.token_ids)], version)
            records.append(record)
            metrics.update({f"eval/{name}/{score}": value for score, value in record["scores"].items()})
            if len(groups) > len(tokenized.token_ids):
                scores, _ = score_groups(groups)
                metrics.update({f"eval/{name}/full/{score}": value for score, value in scores.items()})
        if records:
            metrics["eval/average/pass@1"] = float(np.mean([record["scores"]["pass@1"] for record in records]))
        return records, metrics

    def describe(self, step: int, metrics: Metrics) -> str:
        """One line for the progress display, with steps numbered as it numbers them."""
        parts = []
        for tokenized in self.benchmarks:
            name = f"eval/{tokenized.benchmark.name}/pass@1"
            low, high = metrics[f"{name}/ci_low"], metrics[f"{name}/ci_high"]
            parts.append(f"{tokenized.benchmark.name} {metrics[name]:.1%} [{low:.1%}, {high:.1%}]")
        warm = self.config.warm_steps
        at = f"warm start step {step}" if 0 < step <= warm else f"step {max(0, step - warm)}"
        return f"{at} pass@1: " + ", ".join(parts)

    def _sample(
        self, collector: RolloutPool | RolloutSource, tokenized: TokenizedBenchmark, version: int, *, full: bool
    ) -> list[ScoredGroup]:
        """The subset's groups; with `full` those of the other problems after them."""
        seeded = self.config.rollout.deterministic
        n = self.config.evaluation.samples_per_prompt
        pairs = list(zip(tokenized.benchmark.prompts, tokenized.token_ids, strict=True))
        if full:
            pairs += zip(tokenized.benchmark.left_out, tokenized.left_out_ids, strict=True)
        requests = []
        for place, (prompt, ids) in enumerate(pairs):
            # Seeds that training does not use: it has no step −1.
            seed = request_seed(self.config.seed, -1, 0, place)
            episode = EpisodeStart.of(prompt, tokenized.benchmark.template, seed) if self._multi_turn else None
            requests.append(SampleRequest(prompt, ids, n, seed if seeded else None, episode=episode, rewards=False))
        return collector.collect(requests, self.sampling, version).groups

    def _record(self, tokenized: TokenizedBenchmark, groups: Sequence[ScoredGroup], version: int) -> dict[str, Any]:
        benchmark = tokenized.benchmark
        scores, per_problem = score_groups(groups)
        return {
            "benchmark": benchmark.name,
            "weights_version": version,
            "num_problems": len(groups),
            "samples_per_prompt": self.config.evaluation.samples_per_prompt,
            "scores": scores,
            "per_problem": per_problem,
            "problem_ids": [group.group.prompt.id for group in groups],
            "data_sha256": benchmark.sha256,
            "files_sha256": benchmark.files_sha256,
            "sampling": {
                "temperature": self.sampling.temperature,
                "max_new_tokens": self.sampling.max_new_tokens,
                "seeded": self.config.rollout.deterministic,
                **self._recorded,
            },
            "template": benchmark.template,
            **({"answer": "boxed"} if self.config.verifier.answer == "boxed" else {}),
            # What a verdict may depend on.
            "versions": {"gxpo": __version__, "math-verify": importlib.metadata.version("math-verify")},
            **({"environment": self.config.environment.model_dump(include=_RECORDED)} if self._multi_turn else {}),
        }


def score_groups(groups: Sequence[ScoredGroup]) -> tuple[Metrics, list[float]]:
    """Scores over problems, and the share of correct responses of each problem.

    A response whose verdict is `timeout` or `error` counts as not correct here: an evaluation reports what a user
    would get. `failed_fraction` is their share.
    """
    correct = np.array([[v.status == "correct" for v in group.verdicts] for group in groups], dtype=np.float64)
    n = correct.shape[1]
    counts = correct.sum(axis=1).astype(int)
    values = {f"pass@{k}": [pass_at_k(n, int(c), k) for c in counts] for k in range(1, n + 1)}
    values[f"maj@{n}"] = [
        majority_at_n([v.extracted for v in group.verdicts], [v.status == "correct" for v in group.verdicts])
        for group in groups
    ]
    scores: Metrics = {}
    for name, column in values.items():
        scores[name] = float(np.mean(column))
        scores[f"{name}/ci_low"], scores[f"{name}/ci_high"] = proportion_interval(column)
    samples = [sample for group in groups for sample in group.group.samples]
    scores["length_mean"] = float(np.mean([sample.num_sampled for sample in samples]))
    scores["truncated_fraction"] = float(np.mean([sample.truncated for sample in samples]))
    scores["failed_fraction"] = float(np.mean([v.failed for group in groups for v in group.verdicts]))
    return scores, [float(x) for x in correct.mean(axis=1)]


def evaluate_model(args: argparse.Namespace) -> int:
    """`gxpo eval`: sample, grade and print tables; with --out also write one JSON line per benchmark."""
    if args.out is not None:
        check_output(args.out)
    config, body = _config(args)
    placement = Placement.decide(config)
    check_heads(body, config, placement.device)
    folder = resolve_model(config.model)
    tokenizer = load_tokenizer(config.model)
    check_conversations(config, tokenizer)
    most = positions(body)
    fix = "set a larger model.max_length by --set"
    if config.model.max_length == most:
        fix = f"lower --max-new-tokens; the model has {most} positions"
    benchmarks = tokenized_benchmarks(config, tokenizer, fix)
    check_tokens(language_model(body), tokenizer, chain.from_iterable(b.token_ids for b in benchmarks))
    first = benchmarks[0].benchmark
    first_messages(config, tokenizer, first.prompts[0], first.template)
    evaluator = Evaluator(config, benchmarks)
    identity = {"model": config.model.path, "policy_sha256": hash_path(Path(folder)) if Path(folder).is_dir() else None}
    log = Console(stderr=True)

    @lru_cache(maxsize=1)  # it is told about twice a second, mostly of the same
    def on_wait(missing: str) -> None:
        log.print(f"eval: waiting for {missing}", markup=False)

    with ray_session(placement, on_wait) as settled:
        pool = build_pool(
            config, settled, folder, lambda kind, message, **_: log.print(f"eval: {kind}: {message}", markup=False)
        )
        try:
            pool.start()
            with log.status("sampling and grading"):
                sampled, _ = evaluator.run(pool, version=0)
        finally:
            pool.kill()
    records = [{**identity, **record} for record in sampled]
    if args.out is not None:
        lines = [json.dumps(plain(record), ensure_ascii=False) for record in records]
        Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    show_scores(records, config.evaluation.samples_per_prompt)
    return 0


def _config(args: argparse.Namespace) -> tuple[RunConfig, dict[str, Any]]:
    """A run config with the settings of the evaluation, and the model's config.json. Raises ConfigError."""
    max_new_tokens = args.max_new_tokens or STARTER_TOKENS.get(args.model, 3072)
    settings = {
        "name": "eval",
        "seed": args.seed,
        "model": {"path": args.model, "max_length": MOST_TOKENS},
        "rollout": {"max_new_tokens": max_new_tokens, "samples_per_prompt": max(2, args.samples)},
        "evaluation": {
            "benchmarks": list(args.benchmark),
            "data_root": None if args.data_root is None else str(args.data_root),
            "template": args.template,
            "samples_per_prompt": args.samples,
            "num_problems": args.problems,
            "max_new_tokens": max_new_tokens,
            "temperature": args.temperature,
        },
    }
    config = build(settings, args.set, source="gxpo eval")
    body, length = config_json(config.model), config.model.max_length
    length = min(length, positions(body) or length)
    # What the environment may write is known once its settings are.
    observed = config.environment.observation_tokens
    limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    if observed >= length:
        raise ConfigError(
            f"the environment may write {observed} tokens, and the model has {length} positions; lower "
            "environment.max_turns or environment.max_observation_tokens by --set"
        )
    if args.max_new_tokens is None and "max_new_tokens" not in "".join(args.set):
        limit = min(limit, max((length - observed) // 2, length - observed - _PROMPT))
        config = config.updated(evaluation={"max_new_tokens": limit})
    if config.model.max_length == MOST_TOKENS:
        length = min(length, limit + observed + _PROMPT)
    return config.updated(model={"max_length": length}, placement={"learner_ranks": 0}), body
