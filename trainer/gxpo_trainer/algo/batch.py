"""From scored groups to advantages, the sequences of a step, and each rank's share of them. Pure numpy.

    scored groups ──make_batch──▶ StepBatch ──mini_batches──▶ ──shard──▶ one StepBatch per rank

Advantages are relative to the group: A = (R − mean(R_group)) / (std(R_group) + ε), as in DeepSeekMath (arXiv
2402.03300, eq. 4). Without the division it is Dr. GRPO's advantage (arXiv 2503.20783), which does not favour groups
that are nearly all correct or nearly all wrong. The standard deviation is the sample one (n − 1), as in common
implementations. A reward of None (the verifier timed out or failed) is no evidence about the policy: such a sample is
excluded from the mean and the spread of its group and gets no advantage. `learner.advantage` may name another
`Advantage`: MaxRL, the shrinkage baseline, or one of yours.

An episode of an agent may have several rows of tokens; all have its advantage, and together they count as one response
in the denominators.

The denominators of the loss (`LossScale`) are those of the whole step batch over all ranks, and every token carries
its final weight. A plain sum over micro-batches and ranks is therefore the loss of the batch, and accumulated gradients
equal those of one large batch, however it is divided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import AdvantageSettings, GroupAdvantageConfig, LossSettings, OptimizerConfig
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.plugins import implementation
from gxpo_trainer.types import Metrics, ScoredGroup

Rewards = Sequence[float | None]
FloatArray = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]


def rewards_array(rewards: Rewards) -> FloatArray:
    """Rewards as float64[n], NaN where there is no evidence.

    Raises ValueError for a reward that is NaN or infinite, which means a broken verifier.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    known = np.array([reward is not None for reward in rewards], dtype=bool)
    if not np.isfinite(values[known]).all():
        raise ValueError(f"a reward is not finite: {list(rewards)}; return None where there is no evidence")
    return values


def zero_variance(rewards: Rewards) -> bool:
    """True when the group carries no signal: no two samples with evidence differ in reward.

    Groups with fewer than two samples with evidence are included: nothing can be compared in them.
    """
    values = [reward for reward in rewards if reward is not None]
    return all(value == values[0] for value in values)


def group_advantages(rewards: FloatArray, *, use_std: bool, epsilon: float) -> FloatArray:
    """Advantages of one group (`rewards_array`), float64[n].

    A group of equal rewards gets exactly 0 everywhere (rounding of its mean must not become a signal when the
    spread, and with it the divisor, is nearly 0).
    """
    evidence = ~np.isnan(rewards)
    known = rewards[evidence]
    advantages = np.where(evidence, 0.0, np.nan)
    if not (known == known[:1]).all():
        centred = known - known.mean()
        advantages[evidence] = centred / (known.std(ddof=1) + epsilon) if use_std else centred
    return advantages


class Advantage(Protocol):
    """Advantages of a step: what `implementation` of a settings class names.

    The class takes its settings and those of `learner.loss`, and is constructed for each step.
    """

    def __call__(self, groups: Sequence[FloatArray]) -> Sequence[FloatArray]:
        """Advantages of the same shapes. groups: float64[n] of each prompt's n rewards, NaN where there is no evidence.

        What is returned there is not used; elsewhere it must be finite.
        """


class GroupAdvantage:
    """`group_advantages` of each group."""

    def __init__(self, settings: AdvantageSettings, loss: LossSettings) -> None:
        self._loss = loss

    def __call__(self, groups: Sequence[FloatArray]) -> Sequence[FloatArray]:
        loss = self._loss
        return [group_advantages(r, use_std=loss.advantage_std, epsilon=loss.advantage_epsilon) for r in groups]


class MaxRLAdvantage(GroupAdvantage):
    """(R − mean) / mean of the group: MaxRL, arXiv 2602.02710, algorithm 1; 0 in a group without any reward.

    With rewards of 0 and 1 its policy gradient is that of log P(correct) to the order of the group's size. Raises
    TrainingError for a negative reward.
    """

    def __call__(self, groups: Sequence[FloatArray]) -> Sequence[FloatArray]:
        if any((rewards < 0).any() for rewards in groups):
            raise TrainingError(
                'learner.advantage.name = "maxrl" divides by the mean reward of a group, and a reward is negative; '
                "remove the component that gives it, or choose another advantage"
            )
        return [
            group_advantages(rewards, use_std=False, epsilon=0.0) / np.nanmean(rewards)
            if np.nansum(rewards) > 0
            else np.zeros_like(rewards)
            for rewards in groups
        ]


class ShrinkageAdvantage(GroupAdvantage):
    """R − b with a baseline b between two means: shrinkage baseline, arXiv 2511.03710, eq. 10 to 16.

        b = (1 − λ) · (mean of the group's other rewards) + λ · (mean of the other groups' means)
        λ = (n − 1)/n · v / (v + s)

    for n groups; v: mean over the other groups of the variance of their mean (sample variance / size); s: variance of
    the other groups' means. b does not depend on the reward that it is subtracted from. A reward that nothing can be
    compared with gets 0.

    Differs from the paper in groups of unequal size: one with a single reward has λ = 1, and no part in the others' v.
    """

    def __call__(self, groups: Sequence[FloatArray]) -> Sequence[FloatArray]:
        known = [rewards[~np.isnan(rewards)] for rewards in groups]
        means = np.array([own.mean() if own.size else np.nan for own in known])
        # Relative to the first reward, so that equal ones have no spread by rounding.
        noise = np.array([(own - own[0]).var(ddof=1) / own.size if own.size > 1 else np.nan for own in known])
        advantages = []
        for number, (rewards, own) in enumerate(zip(groups, known, strict=True)):
            others, variances = (part[~np.isnan(part)] for part in (np.delete(means, number), np.delete(noise, number)))
            v = variances.mean() if variances.size else 0.0
            shrinkage = others.size / (others.size + 1) * v / (v + others.var()) if v > 0 else 0.0
            target = others.mean() if others.size else rewards
            first = own[0] if own.size else 0.0
            rest = first + ((own - first).sum() - (rewards - first)) / (own.size - 1) if own.size > 1 else target
            advantages.append(rewards - (1 - shrinkage) * rest - shrinkage * target)
        return advantages


def step_advantages(rewards: Sequence[Rewards], loss: LossSettings, settings: AdvantageSettings) -> list[FloatArray]:
    """Advantages of each group of a step, float64[n], NaN where the reward is None.

    Raises TrainingError for rewards that the advantage cannot use, and for a custom one that breaks its contract.
    """
    groups = [rewards_array(group) for group in rewards]
    advantage: Advantage = implementation(settings)(settings, loss)
    made = [np.asarray(values, dtype=np.float64) for values in advantage([group.copy() for group in groups])]
    shapes, wanted = [values.shape for values in made], [group.shape for group in groups]
    if shapes != wanted:
        problem = f"arrays of the shapes {shapes} for groups of the shapes {wanted}; return one array of each shape"
    elif not all(np.isfinite(values[~np.isnan(group)]).all() for group, values in zip(groups, made, strict=True)):
        problem = "an advantage that is not finite for a sample with a reward; return a finite number"
    else:
        return [np.where(np.isnan(group), np.nan, values) for group, values in zip(groups, made, strict=True)]
    raise TrainingError(f'learner.advantage.name = "{settings.name}" returned {problem}')


def reward_metrics(groups: Sequence[Rewards]) -> Metrics:
    """`reward/mean`, `reward/std` (n − 1) over all samples with evidence; `reward/zero_variance_fraction` over groups.

    Groups without any evidence are left out of the fraction. A value without data is left out.
    """
    metrics: Metrics = {}
    values = np.array([reward for rewards in groups for reward in rewards if reward is not None], dtype=np.float64)
    with_evidence = [rewards for rewards in groups if any(reward is not None for reward in rewards)]
    if values.size:
        metrics["reward/mean"] = float(values.mean())
        metrics["reward/zero_variance_fraction"] = sum(map(zero_variance, with_evidence)) / len(with_evidence)
    if values.size > 1:
        metrics["reward/std"] = float(values.std(ddof=1))
    return metrics


Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One response with the inputs of its loss.

    prompt_ids: int32[n], n ≥ 1. response_ids: int32[m]. sampler_logprobs: float32[m], the sampler's log π at the
    sampling temperature. in_loss False: left out of the loss and its denominators. sampled: bool[m], False for tokens
    that an environment wrote: later tokens attend to them, and they are in no loss, statistic or denominator; None: the
    policy sampled all. group: number in the step, because two groups may have equal prompts. response_sampled: sampled
    tokens in all rows of the response; None: this is its only row.
    """

    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    advantage: float
    sampler_logprobs: npt.NDArray[np.float32]
    in_loss: bool = True
    sampled: npt.NDArray[np.bool_] | None = None
    group: int = 0
    response_sampled: int | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled: those of the loss."""
        return len(self.response_ids) if self.sampled is None else int(self.sampled.sum())

    @property
    def num_in_response(self) -> int:
        """Sampled tokens of the response of which this is a row."""
        return self.num_sampled if self.response_sampled is None else self.response_sampled

    def targets(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of one value per response token, those of the sampled tokens."""
        return values if self.sampled is None else values[self.sampled]


@dataclass(frozen=True, slots=True)
class LossScale:
    """Denominators of the loss: of the whole step batch over all ranks, counting only sequences in the loss.

    num_tokens: sampled tokens. num_sequences: responses; one of several rows counts by the share of its tokens that is
    here. token_limit: most sampled tokens a response may have (`rollout.max_new_tokens`).
    """

    num_tokens: int
    num_sequences: float
    token_limit: int

    def token_weight(self, num_sampled: int, aggregation: Aggregation) -> float:
        """Weight of each of a response's m = num_sampled tokens (of all its rows); the weighted sum is the loss.

        token_mean: 1/N. sequence_mean: 1/(S·m). sequence_sum: 1/(S·limit) (Dr. GRPO, arXiv 2503.20783).
        """
        if aggregation == "token_mean":
            return 1.0 / self.num_tokens
        if aggregation == "sequence_mean":
            return 1.0 / (self.num_sequences * num_sampled)
        return 1.0 / (self.num_sequences * self.token_limit)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The sequences of one step (or of one rank's share of it). The samples of a prompt are adjacent.

    supervised: whether the responses are to be imitated, by cross-entropy; without it the policy sampled them.
    """

    sequences: tuple[ScoredSequence, ...]
    scale: LossScale
    supervised: bool = False

    def in_loss(self) -> list[int]:
        return [index for index, sequence in enumerate(self.sequences) if sequence.in_loss]


def make_batch(
    scored: Sequence[ScoredGroup],
    loss: LossSettings,
    token_limit: int,
    relative: AdvantageSettings | None = None,
    *,
    distilled: bool = False,
) -> tuple[StepBatch, Metrics]:
    """StepBatch of one step and the metrics `reward/*` and `policy/advantage_abs_mean`.

    relative: `learner.advantage`; None: to the group. distilled: a teacher's scores are the advantages, so that every
    sampled token counts, and rewards are measured only.

    Left out of the loss: samples without evidence (reward None) or without a sampled token, groups of equal rewards
    unless `zero_variance = "keep"` (the caller resamples them), truncated responses with `mask_truncated` (their
    rewards still count in their group's mean and spread). They stay in the batch with in_loss = False.
    """
    sequences: list[ScoredSequence] = []
    rewards = [[verdict.reward for verdict in item.verdicts] for item in scored]
    if distilled:
        by_group = [np.zeros(len(group)) for group in rewards]
    else:
        by_group = step_advantages(rewards, loss, relative or GroupAdvantageConfig())
    for number, (item, group_rewards, advantages) in enumerate(zip(scored, rewards, by_group, strict=True)):
        dropped = loss.zero_variance != "keep" and zero_variance(group_rewards)
        for sample, advantage in zip(item.group.samples, advantages, strict=True):
            evidence = not np.isnan(advantage)
            masked = dropped or (loss.mask_truncated and sample.truncated) or sample.num_sampled == 0
            for row in sample.rows:
                prompt = row.prompt_token_ids
                sequences.append(
                    ScoredSequence(
                        prompt_ids=item.group.prompt_token_ids if prompt is None else prompt,
                        response_ids=row.token_ids,
                        advantage=float(advantage) if evidence else 0.0,
                        sampler_logprobs=row.logprobs,
                        in_loss=evidence and not masked,
                        sampled=row.sampled,
                        group=number,
                        response_sampled=sample.num_sampled if sample.branches else None,
                    )
                )
    metrics = reward_metrics(rewards)
    sizes = [abs(sequence.advantage) for sequence in sequences if sequence.in_loss]
    if sizes and not distilled:
        metrics["policy/advantage_abs_mean"] = float(np.mean(sizes))
    return with_scale(sequences, token_limit), metrics


def with_scale(sequences: Sequence[ScoredSequence], token_limit: int) -> StepBatch:
    """A whole step batch of these sequences: counts its own denominators."""
    counted = [sequence for sequence in sequences if sequence.in_loss]
    responses = sum(sequence.num_sampled / sequence.num_in_response for sequence in counted)
    return StepBatch(tuple(sequences), LossScale(sum(s.num_sampled for s in counted), responses, token_limit))


def supervised_batch(prompts: Sequence[Tokens], completions: Sequence[Tokens], token_limit: int) -> StepBatch:
    """StepBatch of completions to imitate, each of advantage 1 and in a group of its own; int32[length] each."""
    sequences = [
        ScoredSequence(prompt, completion, 1.0, np.zeros(len(completion), np.float32), group=number)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    return replace(with_scale(sequences, token_limit), supervised=True)


def prompt_groups(batch: StepBatch) -> list[list[int]]:
    """Indices of the sequences by group: runs of neighbours with equal numbers and prompts."""
    return _runs([(sequence.group, sequence.prompt_ids.tobytes()) for sequence in batch.sequences])


def _runs(keys: Sequence[object]) -> list[list[int]]:
    """Indices of neighbours with equal keys."""
    return [list(run) for _, run in itertools.groupby(range(len(keys)), key=keys.__getitem__)]


def mini_batches(batch: StepBatch, num_mini_batches: int) -> list[StepBatch]:
    """Split into consecutive parts of whole prompt groups, each a step batch with denominators of its own.

    A group has all rows of its responses, whatever their prompts.
    """
    groups = _runs([sequence.group for sequence in batch.sequences])
    assert num_mini_batches <= len(groups), "RunConfig allows no more parts than prompts"
    parts = np.array_split(np.arange(len(groups)), num_mini_batches)
    split = [
        with_scale([batch.sequences[i] for g in part for i in groups[g]], batch.scale.token_limit) for part in parts
    ]
    return [replace(part, supervised=batch.supervised) for part in split]


def shard(batch: StepBatch, num_ranks: int) -> list[StepBatch]:
    """One share per rank, balanced by tokens in the loss, all with the scale of the whole; none is empty.

    Prompt groups stay whole; with fewer groups than ranks they are split. Greedy: the largest group goes to the rank
    with the fewest tokens. The result depends only on the batch and the number of ranks.
    """
    assert num_ranks <= len(batch.sequences), "RunConfig allows no more ranks than prompts of a mini-batch"
    units = prompt_groups(batch)
    if len(units) < num_ranks:
        units = [[index] for index in range(len(batch.sequences))]
    tokens = [sequence.num_tokens * sequence.in_loss for sequence in batch.sequences]
    sized = [(sum(tokens[i] for i in unit), unit) for unit in units]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for size, unit in sorted(sized, key=lambda pair: pair[0], reverse=True):
        # Empty shares first, whatever the loads: units without a token in the loss have no load.
        rank = min(range(num_ranks), key=lambda r: (bool(shares[r]), loads[r], len(shares[r])))
        shares[rank].extend(unit)
        loads[rank] += size
    return [replace(batch, sequences=tuple(batch.sequences[i] for i in sorted(share))) for share in shares]


def learning_rate(settings: OptimizerConfig, step: int, done: float, total: float | None) -> float:
    """η at training step `step`, counted from 1, however many optimizer steps the rule takes in it.

    done, total: steps of the budget that were taken before this one, and all of them; needed by the decaying schedules.
    Warm-up is linear up to η at step `warmup_steps`; `linear` and `cosine` then fall to 0 after `total`.
    """
    base = settings.learning_rate
    if step <= settings.warmup_steps:
        return base * step / settings.warmup_steps
    if settings.schedule == "constant":
        return base
    assert total is not None, "RunConfig needs a bound for a schedule"
    share = min(1.0, max(0.0, done - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    return base * (1 - share) if settings.schedule == "linear" else base * (1 + math.cos(math.pi * share)) / 2
