"""Surrogate losses of the GRPO family, with a KL term and a correction for samples of another policy.

    L_t = w_t · [ c_t · S_t + β · KL_t ],   ρ_t = exp(log π_θ − log π_old)

Surrogate S_t (`surrogate`):

    ppo     −min(ρ_t A, clip(ρ_t, 1 − ε_low, 1 + ε_high) A)       DeepSeekMath, arXiv 2402.03300, eq. 3
    gspo    −min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)           GSPO, arXiv 2507.18071
            s = (π_θ(y)/π_old(y))^(1/|y|) = exp(mean_t log ρ_t)   the same at each token of the row y
    cispo   −sg[clip(ρ_t, 1 − ε_low, 1 + ε_high)] A log π_θ       CISPO, MiniMax-M1, arXiv 2506.13585
    dppo    −M_t ρ_t A,  M_t = 0 if D_t > δ and the probability   DPPO, arXiv 2602.04879
            moves as A wants (rises if A > 0, falls if A < 0)
            D_t = |π_θ − π_old| or KL of the two Bernoulli distributions "this token or another"

ε_low ≠ ε_high is DAPO's clip-higher (arXiv 2503.14476).

    KL_t = exp(q) − q − 1,  q = log π_ref − log π_θ               k3; Schulman, "Approximating KL divergence", 2020

π_old is the learner's policy before the step (`proximal = "learner"`), or the policy μ that sampled (`"sampler"`).
A response is one row, or several where an agent or a chat template rewrites earlier turns. Importance weights:
u_t = exp(log π_target − log μ) of a token, U = Π_t u_t of its row. A correction (`correction`) replaces u_t by v_t:

    none             1 with `learner`, u_t with `sampler`
    token_truncate   min(u_t, high)                               truncated importance sampling (TIS)
    token_mask       u_t if low ≤ u_t ≤ high, else 0
    sequence_mask    U if low ≤ U ≤ high, else 0                  the same at each token of the row

With `learner`, π_target = π_old and c_t = v_t: the decoupled objective, arXiv 2110.00641. With `sampler`,
π_target = π_θ; there ρ_t is u_t already, so that c_t = v_t/u_t. Either way the gradient of a token whose ratio is not
clipped is −v_t A ∇log π_θ at the target policy. No gradient flows through c_t.

The weights w_t hold the aggregation (batch.py), so the loss of a batch is the plain sum over micro-batches and ranks.

A custom loss replaces S_t (`Surrogate`); w_t, c_t and the KL term stay what `learner.loss` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config import DppoLossConfig, LossConfig, LossSettings
from gxpo_trainer.plugins import implementation
from gxpo_trainer.types import Metrics

MAXIMA = frozenset({"logprob_gap_max", "importance_max"})
"""Statistics that combine by maximum; all others by sum."""


class TokenOutputs(NamedTuple):
    """Outputs of the policy for the T sampled tokens of a micro-batch.

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
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch (scalar) and its statistics (float64 scalars; `combine_statistics`).

    old_logprobs: float32[T] of the learner before the step, None in the first pass on the batch, where they are the
    current ones; not used with `proximal = "sampler"`. reference_logprobs: float32[T] of the frozen reference; None
    only when `kl_beta` is 0. settings: resolved (`LossConfig.resolved`); automatic values count as those of strict
    on-policy training.
    """
    assert settings.kl_beta == 0 or reference_logprobs is not None
    logprobs = outputs.logprobs
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    target = old
    if settings.proximal == "sampler":
        old, target = micro.sampler_logprobs, logprobs.detach()
    surrogate: Surrogate = implementation(settings)(settings)
    ratio, token_loss, *counted_as_clipped = surrogate(logprobs - old, logprobs, micro)
    outside = counted_as_clipped[0] if counted_as_clipped else None
    gap = (logprobs.detach() - micro.sampler_logprobs).abs()
    values, maxima = {"ratio_mean": ratio, "logprob_gap_mean": gap}, {"logprob_gap_max": gap}
    if settings.corrects or settings.proximal == "sampler":
        raw, used, factor = _importance(target - micro.sampler_logprobs, micro, settings)
        values |= {"importance_mean": raw, "importance_used": used, "importance_squared": used.square()}
        maxima["importance_max"] = raw
        if settings.corrects:
            token_loss = token_loss * factor
    if reference_logprobs is not None:
        values["kl"] = k3_divergence(logprobs, reference_logprobs)
        if settings.kl_beta > 0:
            token_loss = token_loss + settings.kl_beta * values["kl"]
    if outputs.entropy is not None:
        values["entropy"] = outputs.entropy
    loss = (micro.token_weights * token_loss).sum()
    with torch.no_grad():
        low = ((ratio < 1 - settings.clip_low) if outside is None else outside) & (micro.advantages < 0)
        high = ((ratio > 1 + settings.clip_high) if outside is None else outside) & (micro.advantages > 0)
        values |= {"clip_fraction": low | high, "clip_low_fraction": low, "clip_high_fraction": high}
        counted = micro.token_weights > 0
        statistics = {name: torch.where(counted, each, 0).sum(dtype=torch.float64) for name, each in values.items()}
        statistics |= {name: torch.where(counted, each, 0.0).max().double() for name, each in maxima.items()}
        return loss, {"loss": loss.detach().double(), "tokens": counted.sum(dtype=torch.float64), **statistics}


def distillation_advantages(outputs: TokenOutputs, old: Tensor | None, teacher: Tensor) -> Tensor:
    """A_t = log π_teacher − log π_old of each sampled token, float32[T]: on-policy distillation.

    Its mean over samples of π_old is −KL(π_old ‖ π_teacher) of the next token. old: as of `policy_loss`. teacher:
    float32[T]. The policy gradient with these advantages is that of the reverse divergence token by token, as if later
    tokens did not depend on earlier ones (Agarwal et al. 2024, arXiv 2306.13649, whose student samples alone).
    """
    return teacher - (outputs.logprobs.detach() if old is None else old)


def supervised_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of a micro-batch's responses, Σ_t −w_t log π_θ, and its statistics, as of `policy_loss`.

    With `token_mean` it is the loss of transformers where the labels of prompts are −100.
    """
    loss = -(micro.token_weights * outputs.logprobs).sum()
    counted = micro.token_weights > 0
    statistics = {"loss": loss.detach().double(), "tokens": counted.sum(dtype=torch.float64)}
    values = {"cross_entropy": -outputs.logprobs.detach(), "entropy": outputs.entropy}
    statistics |= {k: torch.where(counted, v, 0).sum(dtype=torch.float64) for k, v in values.items() if v is not None}
    return loss, statistics


class Surrogate(Protocol):
    """The surrogate of a loss: what `implementation` of its settings class names; the class takes the settings.

    A function of its arguments alone: one is constructed for each micro-batch.
    """

    def __call__(
        self, log_ratio: Tensor, logprobs: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """The ratios ρ_t, which metrics describe, and S_t, which is differentiated; float32[T] each.

        A third result, bool[T], says which tokens `clip_fraction` counts; without it, those whose ratio is clipped by
        `clip_low` and `clip_high`.

        log_ratio: float32[T], log π_θ − log π_old. logprobs: float32[T], log π_θ. Both have gradients. micro:
        advantages, sequence_index and sampler_logprobs of the T tokens; `sequence_sums` adds over rows of responses.
        """


class ClippedSurrogate:
    """ppo, gspo and cispo. With `gspo` ρ_t is the ratio of the row at each of its tokens."""

    def __init__(self, settings: LossConfig) -> None:
        self._settings = settings

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self._settings.surrogate == "gspo":
            log_ratio = sequence_sums(log_ratio, micro) / sequence_sums(torch.ones_like(log_ratio), micro)
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - self._settings.clip_low, 1 + self._settings.clip_high)
        if self._settings.surrogate == "cispo":
            return ratio, -clipped.detach() * micro.advantages * logprobs
        return ratio, -torch.minimum(ratio * micro.advantages, clipped * micro.advantages)


class DivergenceMaskedSurrogate:
    """dppo. The divergence is that of the sampled token alone, "binary" in the paper: it needs no other logits."""

    def __init__(self, settings: DppoLossConfig) -> None:
        self._settings = settings

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        ratio = torch.exp(log_ratio)
        with torch.no_grad():
            # Rounding may leave the difference above 0.
            new, old = torch.exp(logprobs), torch.exp(logprobs - log_ratio).clamp(max=1)
            divergence = (new - old).abs()
            if self._settings.divergence == "kl":
                # xlogy is 0 where the old policy never chose another token.
                rest = torch.special.xlogy(1 - old, 1 - old) - torch.special.xlogy(1 - old, 1 - new)
                divergence = rest - old * log_ratio
            rising = (micro.advantages > 0) & (log_ratio > 0) & (divergence > self._settings.clip_high)
            falling = (micro.advantages < 0) & (log_ratio < 0) & (divergence > self._settings.clip_low)
            outside = rising | falling
        return ratio, torch.where(outside, 0.0, -ratio * micro.advantages), outside


@torch.no_grad()
def _importance(log_weights: Tensor, micro: MicroBatch, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token u_t, the weight v_t that replaces it, and the factor c_t of its loss. log_weights: float32[T],
    log u_t."""
    low, high = settings.importance_low, settings.importance_high
    raw, log_used = torch.exp(log_weights), log_weights
    if settings.correction == "token_truncate":
        log_used = log_weights.clamp(max=math.log(high))
    elif settings.correction == "token_mask":
        log_used = torch.where((raw >= low) & (raw <= high), log_weights, -torch.inf)
    elif settings.correction == "sequence_mask":
        log_whole = sequence_sums(log_weights, micro)
        whole = torch.exp(log_whole)
        log_used = torch.where((whole >= low) & (whole <= high), log_whole, -torch.inf)
    used = torch.exp(log_used)
    return raw, used, torch.exp(log_used - log_weights) if settings.proximal == "sampler" else used


def sequence_sums(values: Tensor, micro: MicroBatch) -> Tensor:
    """At each token the sum over the row of a response that it belongs to, float32[T]."""
    # Consecutive tokens of one index are a row; its position counts from 0.
    position = torch.diff(micro.sequence_index, prepend=micro.sequence_index[:1]).ne(0).cumsum(0)
    sums = values.new_zeros(values.shape[0]).index_add(0, position, values)
    return sums[position]


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π_θ ‖ π_ref) at each sampled token; never negative, gradient through π_θ."""
    q = reference_logprobs - logprobs
    return torch.expm1(q) - q


def combine_statistics(total: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combined statistics of two parts of a batch: sums, and maxima for the names in MAXIMA.

    Across ranks the same rule holds: all-reduce by sum, and by maximum for MAXIMA. Every rank and micro-batch of a
    pass has the same names.
    """
    return {
        name: torch.maximum(total[name], value) if name in MAXIMA else total[name] + value
        for name, value in part.items()
    }


def finish_statistics(sums: Mapping[str, Tensor]) -> Metrics:
    """Metrics of a whole pass, without the prefix `policy/` (docs/metrics.md): means over sampled tokens in the loss.

    importance_effective_sample_fraction = (Σv)²/(NΣv²) after the correction. What was not measured is left out; all but
    loss when no token is in the loss.
    """
    totals = {name: float(value) for name, value in sums.items()}
    metrics: Metrics = {"loss": totals.pop("loss")}
    tokens = totals.pop("tokens")
    if tokens == 0:
        return metrics
    used, squared = totals.pop("importance_used", None), tokens * totals.pop("importance_squared", 0.0)
    metrics |= {name: total if name in MAXIMA else total / tokens for name, total in totals.items()}
    if used is not None:
        metrics["importance_effective_sample_fraction"] = used**2 / squared if squared else 0.0
    return metrics
