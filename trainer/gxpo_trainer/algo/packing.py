"""From a rank's share of a step batch to the tensors of its forward passes (`pack`).

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

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gxpo_trainer.algo.batch import Aggregation, StepBatch, prompt_groups
from gxpo_trainer.config.engines import ATTENTION_BREAK_EVEN

Layout = Literal["padded", "shared", "packed"]


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
        tensors = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {name: each if each is None else each.to(device) for name, each in tensors.items()}
        return MicroBatch(**moved)


def pack(
    batch: StepBatch, *, token_budget: int, layout: Layout, aggregation: Aggregation, pad_id: int, multiple: int = 1
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens, padding included; an oversized sequence gets its own micro-batch.
    Rows are padded further to a multiple of `multiple` columns.

    Sequences out of the loss are skipped. Never empty: without any sequence in the loss it is one dummy micro-batch,
    so that every rank has a forward pass to make. Deterministic.
    """
    chosen = batch.in_loss()
    if layout == "padded":
        micros = _stack(batch, [[index] for index in chosen], token_budget)
    elif layout == "shared":
        micros = _stack(batch, _shared_rows(batch, token_budget), token_budget)
    else:
        micros = _fill(batch, chosen, token_budget)
    if not micros:
        return [dummy_micro_batch(pad_id, multiple)]
    shared = layout == "shared"
    return [_assemble(batch, rows, aggregation, pad_id, shared=shared, multiple=multiple) for rows in micros]


def dummy_micro_batch(pad_id: int, multiple: int = 1) -> MicroBatch:
    """Two tokens without weight in the loss, in a row of a multiple of `multiple` columns.

    For a rank that has fewer micro-batches than the others: every rank must make the same number of passes, because
    ZeRO-3 gathers parameters in each.
    """
    ids = torch.full((1, 2 * multiple), pad_id, dtype=torch.int64)
    zero = torch.zeros(1)
    index = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        ids,
        torch.arange(2 * multiple)[None],
        None,
        index,
        ids[0, :1].clone(),
        zero,
        zero.clone(),
        zero.clone(),
        index.clone(),
    )


def _fill(batch: StepBatch, chosen: list[int], token_budget: int) -> list[list[list[int]]]:
    """Packed: micro-batches of one row each; the longest sequences first, each into the first row with room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    lengths = {index: batch.sequences[index].num_tokens for index in chosen}
    for index in sorted(chosen, key=lambda index: -lengths[index]):
        fits = next((row for row, left in enumerate(room) if lengths[index] <= left), len(rows))
        if fits == len(rows):
            rows.append([])
            room.append(token_budget)
        rows[fits].append(index)
        room[fits] -= lengths[index]
    return [[row] for row in rows]


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
    batch: StepBatch, rows: list[list[int]], aggregation: Aggregation, pad_id: int, *, shared: bool, multiple: int
) -> MicroBatch:
    """One micro-batch; each row holds the sequences of `rows[r]`, one after the other or after their one prompt."""
    sequences = batch.sequences
    width = max(_row_width(batch, row) if shared else sum(sequences[i].num_tokens for i in row) for row in rows)
    width = -(-width // multiple) * multiple
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
    owned = [sequences[i] for i in owners]
    lengths = [sequence.num_sampled for sequence in owned]
    advantages = np.array([sequence.advantage for sequence in owned], np.float32)
    weights = [batch.scale.token_weight(sequence.num_in_response, aggregation) for sequence in owned]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=_branch_mask(branch) if shared and any(len(row) > 1 for row in rows) else None,
        target_index=torch.from_numpy(np.concatenate(index)),
        target_ids=torch.from_numpy(
            np.concatenate([sequence.targets(sequence.response_ids) for sequence in owned]).astype(np.int64)
        ),
        advantages=torch.from_numpy(np.repeat(advantages, lengths)),
        token_weights=torch.from_numpy(np.repeat(np.array(weights, np.float32), lengths)),
        sampler_logprobs=torch.from_numpy(
            np.concatenate([sequence.targets(sequence.sampler_logprobs) for sequence in owned]).astype(np.float32)
        ),
        sequence_index=torch.from_numpy(np.repeat(np.array(owners, np.int64), lengths)),
    )


def _branch_mask(branch: npt.NDArray[np.int16]) -> Tensor:
    """bool[rows, 1, width, width]: a token attends to the prompt (0) and its own branch, up to itself."""
    keys = torch.from_numpy(branch)[:, None, None, :]
    queries = torch.from_numpy(branch)[:, None, :, None]
    width = branch.shape[1]
    return ((keys == 0) | (keys == queries)) & torch.ones(width, width, dtype=torch.bool).tril()
