"""From scored groups to the tensors of one forward pass.

    scored groups ──make_batch──▶ StepBatch ──mini_batches──▶ ──shard──▶ one StepBatch per rank ──pack──▶ micro-batches

Only tokens that the policy sampled are targets. What an environment wrote in between (`ScoredSequence.sampled`) is
input that later tokens attend to, and appears in no loss, ratio, statistic or denominator.

The denominators of the loss (`LossScale`) are those of the whole step batch over all ranks, and every token carries
its final weight. A plain sum over micro-batches and ranks is therefore the loss of the batch, and accumulated gradients
equal those of one large batch, however it is divided.

Three layouts:

- `padded`: one sequence per row, sorted by length, padded on the right. No attention mask is needed: under a causal
  mask a token never sees the padding to its right.
- `shared`: like padded, but a row holds the prompt once and then several responses to it. The positions of each
  response continue those of the prompt, and an explicit mask lets it attend to the prompt and itself only. With 8
  short responses per prompt this halves the tokens, so it is the fastest layout on a CPU. A dense mask costs width², so
  long responses get separate rows; where nothing is shared it is `padded`. Not for variable-length attention kernels.
- `packed`: sequences one after the other in a single row, `position_ids` restarting at each. transformers reads the
  boundaries from them (block-diagonal mask, or variable-length attention). Without padding: the layout for GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gxpo_trainer.algo.advantages import advantage_metrics, group_advantages, reward_metrics, zero_variance
from gxpo_trainer.config import LossConfig
from gxpo_trainer.types import Metrics, ScoredGroup

Layout = Literal["padded", "shared", "packed"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]

ATTENTION_BREAK_EVEN = 1024
"""Row width at which dense attention costs about as much as the rest of the model; `shared` fills rows by it."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One response with the inputs of its loss.

    prompt_ids: int32[n], n ≥ 1. response_ids: int32[m]. sampler_logprobs: float32[m], the sampler's log π of the
    response tokens at the sampling temperature. in_loss False: left out of the loss and its denominators. sampled:
    bool[m], False for tokens that an environment wrote: later tokens attend to them, the loss does not contain them;
    None: the policy sampled all.
    """

    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    advantage: float
    sampler_logprobs: npt.NDArray[np.float32]
    in_loss: bool = True
    sampled: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError("prompt_ids is empty; the first response token is predicted from the last prompt token")
        if len(self.response_ids) != len(self.sampler_logprobs):
            raise ValueError(
                f"{len(self.response_ids)} response_ids but {len(self.sampler_logprobs)} sampler_logprobs; "
                "give one log-probability per response token"
            )
        if self.sampled is not None and (
            self.sampled.dtype != np.bool_ or self.sampled.shape != self.response_ids.shape
        ):
            raise ValueError(
                f"{len(self.response_ids)} response_ids but sampled is {self.sampled.dtype}"
                f"{list(self.sampled.shape)}; give one bool per response token"
            )
        if self.in_loss and (self.num_sampled == 0 or not np.isfinite(self.advantage)):
            raise ValueError(
                f"a sequence in the loss has {self.num_sampled} sampled tokens and advantage {self.advantage}; "
                "set in_loss = False for an empty response or a missing advantage"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled: those of the loss."""
        return len(self.response_ids) if self.sampled is None else int(self.sampled.sum())

    def targets(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of one value per response token, those of the sampled tokens."""
        return values if self.sampled is None else values[self.sampled]


@dataclass(frozen=True, slots=True)
class LossScale:
    """Denominators of the loss: of the whole step batch over all ranks, counting only sequences in the loss.

    num_tokens: sampled tokens. token_limit: most sampled tokens a sequence may have (`rollout.max_new_tokens`).
    """

    num_tokens: int
    num_sequences: int
    token_limit: int

    def token_weight(self, num_sampled: int, aggregation: Aggregation) -> float:
        """Weight of each of a response's m = num_sampled tokens; the weighted sum over the batch is the loss.

        token_mean: 1/N. sequence_mean: 1/(S·m). sequence_sum: 1/(S·limit) (Dr. GRPO, arXiv 2503.20783).
        """
        if aggregation == "token_mean":
            return 1.0 / self.num_tokens
        if aggregation == "sequence_mean":
            return 1.0 / (self.num_sequences * num_sampled)
        if aggregation == "sequence_sum":
            return 1.0 / (self.num_sequences * self.token_limit)
        raise ValueError(f"aggregation = {aggregation!r}; use token_mean, sequence_mean or sequence_sum")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The sequences of one step (or of one rank's share of it). The samples of a prompt are adjacent."""

    sequences: tuple[ScoredSequence, ...]
    scale: LossScale

    def in_loss(self) -> list[int]:
        """Indices of the sequences that are in the loss."""
        return [index for index, sequence in enumerate(self.sequences) if sequence.in_loss]


@dataclass(slots=True)
class MicroBatch:
    """Input of one forward pass. T: number of its sampled response tokens.

    input_ids, position_ids: int64[rows, width]. attention_mask: None where positions and causality suffice, else
    bool[rows, 1, width, width], True where a token (third axis) attends to another (fourth).
    target_index: int64[T], flat index row·width + column of the position whose logits predict sampled token t.
    target_ids: int64[T]. advantages, token_weights, sampler_logprobs: float32[T]; a weight is already divided by the
    aggregation's denominator, and 0 excludes a token. sequence_index: int64[T], index of the
    token's sequence in the StepBatch that was packed.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    target_index: Tensor
    target_ids: Tensor
    advantages: Tensor
    token_weights: Tensor
    sampler_logprobs: Tensor
    sequence_index: Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with all tensors on `device`."""
        moved: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, tensor in moved.items():
            moved[name] = None if tensor is None else tensor.to(device)
        return MicroBatch(**moved)


def make_batch(scored: Sequence[ScoredGroup], loss: LossConfig, token_limit: int) -> tuple[StepBatch, Metrics]:
    """StepBatch of one step and the metrics `reward/*` and `policy/advantage_abs_mean`.

    Left out of the loss: samples without evidence (reward None) or without a sampled token, groups of equal rewards
    unless `zero_variance = "keep"` (the caller resamples them), truncated responses with `mask_truncated` (their
    rewards still count in their group's mean and spread). They stay in the batch with in_loss = False.

    Raises ValueError when there is no group at all, or when a group's verdicts do not match its samples.
    """
    if not scored:
        raise ValueError("no scored group in the step; sample at least one prompt")
    sequences: list[ScoredSequence] = []
    rewards = [[verdict.reward for verdict in item.verdicts] for item in scored]
    for item, group_rewards in zip(scored, rewards, strict=True):
        advantages = group_advantages(group_rewards, use_std=loss.advantage_std, epsilon=loss.advantage_epsilon)
        dropped = loss.zero_variance != "keep" and zero_variance(group_rewards)
        for sample, advantage in zip(item.group.samples, advantages, strict=True):
            evidence = not np.isnan(advantage)
            masked = dropped or (loss.mask_truncated and sample.truncated) or sample.num_sampled == 0
            sequences.append(
                ScoredSequence(
                    prompt_ids=item.group.prompt_token_ids,
                    response_ids=sample.token_ids,
                    advantage=float(advantage) if evidence else 0.0,
                    sampler_logprobs=sample.logprobs,
                    in_loss=evidence and not masked,
                    sampled=sample.sampled,
                )
            )
    metrics = reward_metrics(rewards) | advantage_metrics([s.advantage for s in sequences if s.in_loss])
    return with_scale(sequences, token_limit), metrics


def with_scale(sequences: Sequence[ScoredSequence], token_limit: int) -> StepBatch:
    """A whole step batch of these sequences: counts its own denominators."""
    lengths = [sequence.num_sampled for sequence in sequences if sequence.in_loss]
    return StepBatch(tuple(sequences), LossScale(sum(lengths), len(lengths), token_limit))


def prompt_groups(batch: StepBatch) -> list[list[int]]:
    """Indices of the sequences by prompt: runs of neighbours with equal prompts."""
    keys = [sequence.prompt_ids.tobytes() for sequence in batch.sequences]
    return [list(run) for _, run in itertools.groupby(range(len(keys)), key=keys.__getitem__)]


def mini_batches(batch: StepBatch, num_mini_batches: int) -> list[StepBatch]:
    """Split into consecutive parts of whole prompt groups, each a step batch with denominators of its own.

    Raises ValueError when there are fewer groups than parts.
    """
    groups = prompt_groups(batch)
    if not 1 <= num_mini_batches <= len(groups):
        raise ValueError(
            f"learner.mini_batches = {num_mini_batches} but the step has {len(groups)} prompt groups; "
            "use at least 1 and at most as many as prompts"
        )
    parts = np.array_split(np.arange(len(groups)), num_mini_batches)
    return [
        with_scale([batch.sequences[i] for g in part for i in groups[g]], batch.scale.token_limit) for part in parts
    ]


def shard(batch: StepBatch, num_ranks: int) -> list[StepBatch]:
    """One share per rank, balanced by tokens in the loss, all with the scale of the whole; none is empty.

    Prompt groups stay whole; with fewer groups than ranks they are split. Greedy: the largest group goes to the rank
    with the fewest tokens. The result depends only on the batch and the number of ranks.

    Raises ValueError when there are fewer sequences than ranks.
    """
    if not 1 <= num_ranks <= len(batch.sequences):
        raise ValueError(
            f"placement.learner_ranks = {num_ranks} but the batch has {len(batch.sequences)} sequences; "
            "use at least 1 rank and at most as many as sequences"
        )
    units = prompt_groups(batch)
    if len(units) < num_ranks:
        units = [[index] for index in range(len(batch.sequences))]

    def tokens(unit: list[int]) -> int:
        return sum(batch.sequences[i].num_tokens for i in unit if batch.sequences[i].in_loss)

    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for unit in sorted(units, key=tokens, reverse=True):
        # Empty shares first, whatever the loads: units without a token in the loss have no load.
        rank = min(range(num_ranks), key=lambda r: (bool(shares[r]), loads[r], len(shares[r])))
        shares[rank].extend(unit)
        loads[rank] += tokens(unit)
    return [replace(batch, sequences=tuple(batch.sequences[i] for i in sorted(share))) for share in shares]


def pack(
    batch: StepBatch, *, token_budget: int, layout: Layout, aggregation: Aggregation, pad_id: int
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens, padding included; an oversized sequence gets its own micro-batch.

    Sequences out of the loss are skipped. Never empty: without any sequence in the loss it is one dummy micro-batch,
    so that every rank has a forward pass to make. Deterministic.

    Raises ValueError for an unknown layout or a budget below 1.
    """
    if token_budget < 1:
        raise ValueError(f"learner.token_budget = {token_budget}; set it to at least 1")
    chosen = batch.in_loss()
    if layout == "padded":
        micros = _stack(batch, [[index] for index in chosen], token_budget)
    elif layout == "shared":
        micros = _stack(batch, _shared_rows(batch, token_budget), token_budget)
    elif layout == "packed":
        micros = _fill(batch, chosen, token_budget)
    else:
        raise ValueError(f"learner.packing = {layout!r}; use padded, shared or packed")
    if not micros:
        return [dummy_micro_batch(pad_id)]
    return [_assemble(batch, rows, aggregation, pad_id, shared=layout == "shared") for rows in micros]


def dummy_micro_batch(pad_id: int) -> MicroBatch:
    """Two tokens without weight in the loss.

    For a rank that has fewer micro-batches than the others: every rank must make the same number of passes, because
    ZeRO-3 gathers parameters in each.
    """
    ids = torch.full((1, 2), pad_id, dtype=torch.int64)
    zero = torch.zeros(1)
    index = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        ids, torch.arange(2)[None], None, index, ids[0, :1].clone(), zero, zero.clone(), zero.clone(), index.clone()
    )


def _fill(batch: StepBatch, chosen: list[int], token_budget: int) -> list[list[list[int]]]:
    """Packed: micro-batches of one row each, filled in order."""
    micros: list[list[list[int]]] = []
    used = 0
    for index in chosen:
        length = batch.sequences[index].num_tokens
        if micros and used + length <= token_budget:
            micros[-1][0].append(index)
            used += length
        else:
            micros.append([[index]])
            used = length
    return micros


def _stack(batch: StepBatch, rows: list[list[int]], token_budget: int) -> list[list[list[int]]]:
    """Padded and shared: rows of similar width together.

    From the widest down, so that the peak of memory shows in the first micro-batch.
    """
    micros: list[list[list[int]]] = []
    for row in sorted(rows, key=lambda row: _row_width(batch, row), reverse=True):
        if micros and (len(micros[-1]) + 1) * _row_width(batch, micros[-1][0]) <= token_budget:
            micros[-1].append(row)
        else:
            micros.append([row])
    return micros


def _row_width(batch: StepBatch, row: list[int]) -> int:
    """Tokens of one prompt and the responses of `row` to it."""
    return len(batch.sequences[row[0]].prompt_ids) + sum(len(batch.sequences[i].response_ids) for i in row)


def _shared_rows(batch: StepBatch, token_budget: int) -> list[list[int]]:
    """Rows of responses to one prompt. A response joins a row where that costs less than a row of its own.

    The cost of a row of width w is w + w²/ATTENTION_BREAK_EVEN, in tokens of linear work.
    """
    rows: list[list[int]] = []
    for group in prompt_groups(batch):
        width = 0
        for index in (i for i in group if batch.sequences[i].in_loss):
            alone, response = batch.sequences[index].num_tokens, len(batch.sequences[index].response_ids)
            joined = width + response
            cost_joined = response + (joined**2 - width**2) / ATTENTION_BREAK_EVEN
            if width and joined <= token_budget and cost_joined < alone + alone**2 / ATTENTION_BREAK_EVEN:
                rows[-1].append(index)
                width = joined
            else:
                rows.append([index])
                width = alone
    return rows


def _assemble(
    batch: StepBatch, rows: list[list[int]], aggregation: Aggregation, pad_id: int, *, shared: bool
) -> MicroBatch:
    """One micro-batch; each row holds the sequences of `rows[r]`, one after the other or after their one prompt."""
    sequences = batch.sequences
    width = max(_row_width(batch, row) if shared else sum(sequences[i].num_tokens for i in row) for row in rows)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    # Positions of padding continue to increase: a jump would look like the start of another sequence.
    position_ids = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
    # Shared: 0 for the prompt, 1, 2, … for the responses, −1 for padding.
    branch = np.full((len(rows), width), -1, dtype=np.int16)
    index, owners = [], []
    for r, row in enumerate(rows):
        end = prompt_end = 0
        for number, i in enumerate(row):
            prompt, response = sequences[i].prompt_ids, sequences[i].response_ids
            n, m = len(prompt), len(response)
            if number == 0 or not shared:
                input_ids[r, end : end + n] = prompt
                position_ids[r, end : end + n] = np.arange(n)
                branch[r, end : end + n] = 0
                end = prompt_end = end + n
            input_ids[r, end : end + m] = response
            position_ids[r, end : end + m] = np.arange(n, n + m)
            branch[r, end : end + m] = number + 1
            # The prompt's last token predicts the first token of the response, each token of it the next.
            predicting = np.concatenate([[prompt_end - 1], np.arange(end, end + m - 1)])
            index.append(r * width + sequences[i].targets(predicting))
            owners.append(i)
            end += m
    lengths = [sequences[i].num_sampled for i in owners]

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths))

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=_branch_mask(branch) if shared and any(len(row) > 1 for row in rows) else None,
        target_index=torch.from_numpy(np.concatenate(index)),
        target_ids=torch.from_numpy(
            np.concatenate([sequences[i].targets(sequences[i].response_ids) for i in owners]).astype(np.int64)
        ),
        advantages=per_token([sequences[i].advantage for i in owners]),
        token_weights=per_token([batch.scale.token_weight(m, aggregation) for m in lengths]),
        sampler_logprobs=torch.from_numpy(
            np.concatenate([sequences[i].targets(sequences[i].sampler_logprobs) for i in owners]).astype(np.float32)
        ),
        sequence_index=torch.from_numpy(np.repeat(np.array(owners, dtype=np.int64), lengths)),
    )


def _branch_mask(branch: npt.NDArray[np.int16]) -> Tensor:
    """bool[rows, 1, width, width]: a token attends to the prompt (0) and its own branch, up to itself."""
    keys = torch.from_numpy(branch)[:, None, None, :]
    queries = torch.from_numpy(branch)[:, None, :, None]
    width = branch.shape[1]
    return ((keys == 0) | (keys == queries)) & torch.ones(width, width, dtype=torch.bool).tril()
