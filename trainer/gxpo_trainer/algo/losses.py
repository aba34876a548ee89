"""The clipped surrogate of GRPO with a KL term, and the family's options.

    L_t = w_t · [ −c_t · min(ρ_t A, clip(ρ_t, 1 − ε_low, 1 + ε_high) A) + β · KL_t ]
    ρ_t = exp(log π_θ − log π_old)
    KL_t = exp(q) − q − 1,  q = log π_ref − log π_θ           (k3; Schulman, "Approximating KL divergence", 2020)
    c_t = min(exp(log π_old − log π_sampler), cap)            (truncated importance sampling; 1 when off)

DeepSeekMath (arXiv 2402.03300, eq. 3 and 4); ε_low ≠ ε_high is DAPO's clip-higher (arXiv 2503.14476). The weights
w_t hold the aggregation (batch.py), so the loss of a batch is the plain sum over its micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gxpo_trainer.algo.batch import MicroBatch
from gxpo_trainer.config import LossConfig
from gxpo_trainer.types import Metrics

MAXIMA = frozenset({"logprob_gap_max"})
"""Statistics that combine by maximum; all others by sum."""


class TokenOutputs(NamedTuple):
    """Outputs of the policy for the T response tokens of a micro-batch.

    logprobs: float32[T], log π_θ at the sampling temperature, with gradient. entropy: float32[T] in nats, without
    gradient, or None when it was not requested.
    """

    logprobs: Tensor
    entropy: Tensor | None


def policy_loss(
    outputs: TokenOutputs,
    micro: MicroBatch,
    old_logprobs: Tensor | None,
    reference_logprobs: Tensor | None,
    settings: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch (scalar) and its statistics (float64 scalars; `combine_statistics`).

    old_logprobs: float32[T] of the policy that sampled, None in the first pass on the batch, where they equal the
    current ones. reference_logprobs: float32[T] of the frozen reference; None only when `kl_beta` is 0.

    Raises ValueError when `kl_beta` is positive and there is no reference.
    """
    logprobs = outputs.logprobs
    if settings.kl_beta > 0 and reference_logprobs is None:
        raise ValueError(
            f"loss.kl_beta = {settings.kl_beta} needs reference log-probabilities; set kl_beta = 0 or pass them"
        )
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    token_loss = -torch.minimum(ratio * micro.advantages, clipped * micro.advantages)
    if settings.importance_cap is not None:
        token_loss = token_loss * torch.exp(old - micro.sampler_logprobs).clamp(max=settings.importance_cap)
    kl = None if reference_logprobs is None else k3_divergence(logprobs, reference_logprobs)
    if kl is not None and settings.kl_beta > 0:
        token_loss = token_loss + settings.kl_beta * kl
    loss = (micro.token_weights * token_loss).sum()
    return loss, _statistics(loss, ratio, kl, outputs, micro, settings)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π_θ ‖ π_ref) at each sampled token; never negative, gradient through π_θ."""
    q = reference_logprobs - logprobs
    return torch.expm1(q) - q


@torch.no_grad()
def _statistics(
    loss: Tensor, ratio: Tensor, kl: Tensor | None, outputs: TokenOutputs, micro: MicroBatch, settings: LossConfig
) -> dict[str, Tensor]:
    counted = micro.token_weights > 0
    low = (ratio < 1 - settings.clip_low) & (micro.advantages < 0)
    high = (ratio > 1 + settings.clip_high) & (micro.advantages > 0)
    gap = torch.where(counted, (outputs.logprobs - micro.sampler_logprobs).abs(), 0.0)

    def total(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0).sum(dtype=torch.float64)

    statistics = {
        "loss": loss.detach().double(),
        "tokens": counted.sum(dtype=torch.float64),
        "clipped": total(low | high),
        "clipped_low": total(low),
        "clipped_high": total(high),
        "ratio": total(ratio),
        "logprob_gap": total(gap),
        "logprob_gap_max": gap.max().double(),
    }
    if kl is not None:
        statistics["kl"] = total(kl)
    if outputs.entropy is not None:
        statistics["entropy"] = total(outputs.entropy)
    return statistics


def combine_statistics(total: Mapping[str, Tensor] | None, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combined statistics of two parts of a batch: sums, and maxima for the names in MAXIMA. total None: first part.

    Across ranks the same rule holds: all-reduce by sum, and by maximum for MAXIMA. Every rank and micro-batch of a
    pass has the same names.
    """
    if total is None:
        return dict(part)
    return {
        name: torch.maximum(total[name], value) if name in MAXIMA else total[name] + value
        for name, value in part.items()
    }


def finish_statistics(sums: Mapping[str, Tensor]) -> Metrics:
    """Metrics of a whole pass, without the prefix `policy/`.

    loss; and means over response tokens in the loss: clip_fraction (with clip_low_fraction, clip_high_fraction),
    ratio_mean, kl, entropy, and logprob_gap_mean and logprob_gap_max against the sampler. kl and entropy are left out
    where they were not measured; all but loss when no token is in the loss.
    """
    metrics: Metrics = {"loss": float(sums["loss"])}
    tokens = float(sums["tokens"])
    if tokens == 0:
        return metrics
    means = {
        "clip_fraction": "clipped",
        "clip_low_fraction": "clipped_low",
        "clip_high_fraction": "clipped_high",
        "ratio_mean": "ratio",
        "kl": "kl",
        "entropy": "entropy",
        "logprob_gap_mean": "logprob_gap",
    }
    metrics |= {name: float(sums[source]) / tokens for name, source in means.items() if source in sums}
    metrics["logprob_gap_max"] = float(sums["logprob_gap_max"])
    return metrics
