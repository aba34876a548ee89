"""Metrics of a step from rollouts and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout.sources import Rollouts
from gxpo_trainer.rollout.timeline import Span, overlap_fraction
from gxpo_trainer.types import Metrics, Sample, ScoredGroup, VerdictStatus

_UNSCORED: tuple[VerdictStatus, ...] = ("unparsed", "timeout", "error")
MOST_ENGINES = 16
"""Engines in timeline.jsonl."""


def rollout_metrics(rollouts: Rollouts, result: StepResult, *, version: int, total: int) -> Metrics:
    """`rollout/…`, `reward/…` and `verify/…` of one step.

    version: of the learner before the step. total: sampled tokens since the start.
    """
    samples = [sample for group in rollouts.groups for sample in group.group.samples]
    lengths = np.array([sample.num_sampled for sample in samples], dtype=np.float64)
    verdicts = [verdict for group in rollouts.groups for verdict in group.verdicts]
    statuses = Counter(verdict.status for verdict in verdicts)
    metrics: Metrics = {
        "rollout/tokens": float(rollouts.num_tokens),
        "rollout/tokens_total": float(total),
        "rollout/tokens_per_s": rollouts.num_tokens / rollouts.sampling_s if rollouts.sampling_s else 0.0,
        "rollout/engine_idle_fraction": rollouts.idle_fraction,
        "rollout/engines_alive": float(rollouts.engines_alive),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_std": float(lengths.std()),
        "rollout/prompt_length_mean": float(np.mean([len(group.group.prompt_token_ids) for group in rollouts.groups])),
        "rollout/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/logprob_gap_mean": result.gap_mean,
        "rollout/logprob_gap_max": result.gap_max,
        "rollout/weights_version": float(oldest_version(rollouts)),
        "rollout/staleness": float(version - oldest_version(rollouts)),
        "reward/correctness": statuses["correct"] / len(verdicts),
    }
    metrics.update(component_means(rollouts.groups))
    metrics.update(environment_metrics(samples))
    for status in _UNSCORED:
        metrics[f"verify/{status}_fraction"] = statuses[status] / len(verdicts)
    metrics["verify/evasion_fraction"] = sum(verdict.evades for verdict in verdicts) / len(verdicts)
    if (http := rollouts.http) is not None:
        metrics["reward/http_calls"] = float(http.calls)
        metrics["reward/http_s"] = http.seconds
        metrics["reward/http_cache_hits"] = float(http.cache_hits)
    if rollouts.num_resampled:
        metrics["rollout/resample_rounds"] = float(rollouts.num_resampled)
    return metrics


def environment_metrics(samples: Sequence[Sample]) -> Metrics:
    """`env/…`: means over the episodes; empty without an environment."""
    pairs = [(sample, sample.episode) for sample in samples if sample.episode is not None]
    if not pairs:
        return {}
    ends = Counter(episode.end for _, episode in pairs)
    turns = [sum(turn.speaker == "policy" for turn in episode.turns) for _, episode in pairs]
    return {
        "env/turns_mean": float(np.mean(turns)),
        **{f"env/{end}_fraction": ends[end] / len(pairs) for end in ("done", "timeout", "error")},
        "env/observation_tokens": float(np.mean([len(s.token_ids) - s.num_sampled for s, _ in pairs])),
    }


def oldest_version(rollouts: Rollouts) -> int:
    """Oldest version that sampled a token of the batch."""
    return min(scored.group.weights_version for scored in rollouts.groups)


def staleness_metrics(rollouts: Rollouts, *, version: int) -> Metrics:
    """How many versions behind the learner's the sampled tokens are, and what was dropped for it."""
    tokens: Counter[int] = Counter()
    for scored in rollouts.groups:
        for sample in scored.group.samples:
            for sampled_by, count in sample.sampled_versions:
                tokens[version - sampled_by] += count
    groups = len(rollouts.groups) + rollouts.num_dropped
    # No token at all: the first messages of every episode failed.
    mean = sum(behind * count for behind, count in tokens.items()) / max(1, tokens.total())
    return {
        "rollout/staleness_mean": mean,
        "rollout/staleness_max": float(max(tokens, default=0)),
        "rollout/dropped_fraction": rollouts.num_dropped / groups,
    }


def overlap_metrics(spans: Sequence[Span], begin: float, num_engines: int) -> Metrics:
    """`time/…` of the spans since `begin`: what overlapped, and how long engines and learner were idle."""
    elapsed = max((span.end for span in spans), default=begin) - begin
    if elapsed <= 0:
        return {}
    learner = sum(span.seconds for span in spans if span.process == "learner")
    engines = sum(span.seconds for span in spans if span.process.startswith("engine"))
    overlap = overlap_fraction(spans, "sampling", "updating")
    return {
        "time/learner_idle_fraction": 1 - learner / elapsed,
        "time/engine_idle_fraction": 1 - engines / (num_engines * elapsed),
        **({} if overlap is None else {"time/overlap_fraction": overlap}),
    }


def charted_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans of learner, verifier and the first engines: a picture has room for no more."""
    engines = {f"engine {index}" for index in range(MOST_ENGINES)}
    return [span for span in spans if span.process in engines or not span.process.startswith("engine")]


def component_means(groups: Sequence[ScoredGroup]) -> Metrics:
    """`reward/<component>`: the plain value of each reward component, over the samples that have a reward.

    Correctness is a metric of its own, whether it is a component or not: the share of verdicts of all samples.
    """
    rewards = [
        verdict.reward_components for group in groups for verdict in group.verdicts if verdict.reward is not None
    ]
    names = [name for name in (rewards or [{}])[0] if name != "correctness"]
    return {f"reward/{name}": float(np.mean([values[name] for values in rewards])) for name in names}
