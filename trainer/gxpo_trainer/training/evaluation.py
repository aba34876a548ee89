"""Benchmarks during a run and after it, on the sampler of the run.

n responses per problem at temperature 1: pass@1 is their mean, pass@k the unbiased estimator, maj@n that of the
majority's answer; 95% intervals by bootstrap over problems.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer import __version__
from gxpo_trainer.algo.passk import bootstrap_interval, majority_at_n, pass_at_k
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.benchmarks import Benchmark
from gxpo_trainer.rollout.requests import EpisodeStart, SampleRequest, SamplingSettings
from gxpo_trainer.rollout.sources import request_seed
from gxpo_trainer.types import Metrics, ScoredGroup

if TYPE_CHECKING:
    from gxpo_trainer.rollout.pool import RolloutPool
    from gxpo_trainer.rollout.sources import RolloutSource


@dataclass(frozen=True, slots=True)
class TokenizedBenchmark:
    """A benchmark with its prompts rendered for one tokenizer. token_ids: int32[length] each.

    left_out_ids: those of `benchmark.left_out`, for a full evaluation; empty where none will be made.
    """

    benchmark: Benchmark
    token_ids: Sequence[npt.NDArray[np.int32]]
    left_out_ids: Sequence[npt.NDArray[np.int32]] = ()


class Evaluator:
    """Runs the configured benchmarks and turns verdicts into scores."""

    def __init__(self, config: RunConfig, benchmarks: Sequence[TokenizedBenchmark]) -> None:
        self.config = config
        self._multi_turn = config.environment.multi_turn
        self.benchmarks = benchmarks
        limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
        self.sampling = SamplingSettings(max_new_tokens=limit, temperature=1.0)

    def run(
        self, pool: RolloutPool | RolloutSource, *, step: int, version: int, full: bool = False
    ) -> tuple[list[dict[str, Any]], Metrics]:
        """All benchmarks by the weights of `version`: records for evaluations.jsonl, and `eval/…` metrics.

        full: also the problems beyond `evaluation.num_problems`. Records and their metrics stay those of the subset,
        so that they can be compared along the run; `eval/<benchmark>/full/…` are of all problems.
        """
        records = []
        metrics: Metrics = {}
        for tokenized in self.benchmarks:
            name = tokenized.benchmark.name
            groups = self._sample(pool, tokenized, version, full=full)
            record = self._record(tokenized, groups[: len(tokenized.token_ids)], version)
            records.append(record)
            metrics.update({f"eval/{name}/{score}": value for score, value in record["scores"].items()})
            if len(groups) > len(tokenized.token_ids):
                scores, _ = score_groups(groups, seed=self.config.seed)
                metrics.update({f"eval/{name}/full/{score}": value for score, value in scores.items()})
        if records:
            metrics["eval/average/pass@1"] = float(np.mean([record["scores"]["pass@1"] for record in records]))
        return records, metrics

    def describe(self, step: int, metrics: Metrics) -> str:
        """One line for the progress display."""
        parts = []
        for tokenized in self.benchmarks:
            name = f"eval/{tokenized.benchmark.name}/pass@1"
            low, high = metrics[f"{name}/ci_low"], metrics[f"{name}/ci_high"]
            parts.append(f"{tokenized.benchmark.name} {metrics[name]:.1%} [{low:.1%}, {high:.1%}]")
        return f"step {step} pass@1: " + ", ".join(parts)

    def _sample(
        self, pool: RolloutPool | RolloutSource, tokenized: TokenizedBenchmark, version: int, *, full: bool
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
            requests.append(SampleRequest(prompt, ids, n, seed if seeded else None, episode=episode))
        return pool.collect(requests, self.sampling, version, rewards=False).groups

    def _record(self, tokenized: TokenizedBenchmark, groups: Sequence[ScoredGroup], version: int) -> dict[str, Any]:
        benchmark = tokenized.benchmark
        scores, per_problem = score_groups(groups, seed=self.config.seed)
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
            },
            "template": benchmark.template,
            "versions": grader_versions(),
            **self._environment(),
        }

    def _environment(self) -> dict[str, Any]:
        """What answered the policy; nothing where every response is a single turn."""
        if not self._multi_turn:
            return {}
        return {
            "environment": self.config.environment.model_dump(include={"name", "max_turns", "max_observation_tokens"})
        }


def grader_versions() -> dict[str, str]:
    """Versions that a verdict may depend on."""
    return {"gxpo": __version__, "math-verify": importlib.metadata.version("math-verify")}


def score_groups(groups: Sequence[ScoredGroup], *, seed: int) -> tuple[Metrics, list[float]]:
    """Scores over problems, and the share of correct responses of each problem.

    A response whose verdict is `timeout` or `error` counts as not correct here: an evaluation reports what a user
    would get. `failed_fraction` is their share.
    """
    correct = np.array([[v.status == "correct" for v in group.verdicts] for group in groups], dtype=np.float64)
    n = correct.shape[1]
    counts = correct.sum(axis=1).astype(int)
    scores: Metrics = {}
    for k in range(1, n + 1):
        values = np.array([pass_at_k(n, int(c), k) for c in counts])
        _with_interval(scores, f"pass@{k}", values, seed)
    majority = np.array(
        [
            majority_at_n([v.extracted for v in group.verdicts], [v.status == "correct" for v in group.verdicts])
            for group in groups
        ]
    )
    _with_interval(scores, f"maj@{n}", majority, seed)
    samples = [sample for group in groups for sample in group.group.samples]
    scores["length_mean"] = float(np.mean([sample.num_sampled for sample in samples]))
    scores["truncated_fraction"] = float(np.mean([sample.truncated for sample in samples]))
    failed = [v.reward is None for group in groups for v in group.verdicts]
    scores["failed_fraction"] = float(np.mean(failed))
    return scores, [float(x) for x in correct.mean(axis=1)]


def _with_interval(scores: Metrics, name: str, values: npt.NDArray[np.float64], seed: int) -> None:
    low, high = bootstrap_interval(values, seed=seed)
    scores[name] = float(values.mean())
    scores[f"{name}/ci_low"], scores[f"{name}/ci_high"] = low, high
