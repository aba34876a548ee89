"""Metrics of a step from rollouts, verdicts and the machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil

from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout.planner import Rollouts
from gxpo_trainer.types import Metrics, ScoredGroup


def rollout_metrics(rollouts: Rollouts, result: StepResult, *, version: int, total: int) -> Metrics:
    """`rollout/…` and `verify/…` of one step. total: sampled tokens since the start."""
    samples = [sample for group in rollouts.groups for sample in group.group.samples]
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.float64)
    found = [verdict for group in rollouts.groups for verdict in group.verdicts]
    verdicts = [verdict.status for verdict in found]
    metrics: Metrics = {
        "rollout/tokens": float(rollouts.num_tokens),
        "rollout/tokens_total": float(total),
        "rollout/tokens_per_s": rollouts.num_tokens / rollouts.rollout_s if rollouts.rollout_s else 0.0,
        "rollout/engine_idle_fraction": rollouts.idle_fraction,
        "rollout/engines_alive": float(rollouts.engines_alive),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_std": float(lengths.std()),
        "rollout/prompt_length_mean": float(np.mean([len(group.group.prompt_token_ids) for group in rollouts.groups])),
        "rollout/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/logprob_gap_mean": result.gap_mean,
        "rollout/logprob_gap_max": result.gap_max,
        "rollout/weights_version": float(version),
        "rollout/staleness": 0.0,
        "reward/correctness": verdicts.count("correct") / len(verdicts),
    }
    metrics.update(component_means(rollouts.groups))
    for status in ("unparsed", "timeout", "error"):
        metrics[f"verify/{status}_fraction"] = verdicts.count(status) / len(verdicts)
    metrics["verify/evasion_fraction"] = sum(verdict.evades for verdict in found) / len(found)
    if rollouts.num_resampled:
        metrics["rollout/resample_rounds"] = float(rollouts.num_resampled)
    return metrics


def component_means(groups: Sequence[ScoredGroup]) -> Metrics:
    """`reward/<component>_mean`: the plain value of each reward component, over the samples that have a reward."""
    found = [verdict.reward_components for group in groups for verdict in group.verdicts if verdict.reward is not None]
    return {f"reward/{name}_mean": float(np.mean([values[name] for values in found])) for name in (found or [{}])[0]}


def system_metrics() -> Metrics:
    """`system/…`: load of the host since the last call in percent of all cores, memory in use in bytes."""
    return {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/memory_bytes": float(psutil.virtual_memory().used),
    }
