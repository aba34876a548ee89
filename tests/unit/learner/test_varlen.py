"""Variable-length attention: what reaches torch's kernel, with the kernel itself computed sequence by sequence.

The kernel runs on GPUs only (tests/gpu/test_learner.py runs it); everything around it is the product's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.tiny_policy import random_batch, relative_difference, tiny_policy
from torch import Tensor
from torch.nn import functional

from gxpo_trainer.algo.packing import Layout, pack
from gxpo_trainer.learner import logprobs as varlen
from gxpo_trainer.learner.logprobs import PolicyModule, sequence_boundaries, varlen_attention

BATCH = random_batch(seed=3)


def by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of varlen_attn, one sequence at a time. Tokens first: [tokens, heads, size]."""
    parts, bounds = [], starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(query)
    assert longest == max(end - start for start, end in pairwise(bounds))
    for start, end in pairwise(bounds):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril(window_size[1])
        if window_size[0] >= 0:
            near = near.triu(-window_size[0])
        found = functional.scaled_dot_product_attention(q, k, v, near, scale=scale, enable_gqa=enable_gqa)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
    varlen.register()


def outcome(attention: str, layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probabilities in the order of the batch, and the gradient of a weighted sum of them."""
    model: Any = tiny_policy(dtype=dtype)
    model.set_attn_implementation(attention)
    policy = PolicyModule(model)
    logprobs: list[list[float]] = [[] for _ in BATCH.sequences]
    for micro in pack(BATCH, token_budget=70, layout=layout, aggregation="token_mean", pad_id=0):
        found = policy(micro, 0.8, False).logprobs
        (found * micro.advantages * micro.target_ids.sin()).sum().backward()
        for owner, value in zip(micro.sequence_index.tolist(), found.tolist(), strict=True):
            logprobs[owner].append(value)
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return torch.tensor([value for row in logprobs for value in row], dtype=torch.float64), gradient


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_of_several_sequences_give_what_single_rows_give(layout: Layout) -> None:
    expected = outcome("sdpa", "padded")
    for found, reference in zip(outcome("varlen", layout), expected, strict=True):
        assert relative_difference(found, reference) < 1e-12


@pytest.mark.usefixtures("kernel")
def test_no_mask_is_built_for_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        masks.append(mask)
        return varlen_attention(module, query, key, value, mask, **others)

    monkeypatch.setattr(varlen, "varlen_attention", watched)
    varlen.register()
    outcome("varlen", "packed")
    assert masks
    assert all(mask is None for mask in masks)


@pytest.mark.usefixtures("kernel")
def test_a_sliding_window_of_w_tokens_includes_the_token_itself() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2))
    arguments = {"cu_seq_lens_q": torch.tensor([0, 7], dtype=torch.int32), "max_length_q": 7, "scaling": 0.3}
    found, _ = varlen_attention(None, query, key, value, None, sliding_window=3, **arguments)
    # By hand: token t attends to t − 2, t − 1 and t; a key head serves two query heads.
    for t in range(7):
        keys, values = (x[0, :, max(0, t - 2) : t + 1].repeat_interleave(2, 0) for x in (key, value))
        weights = (0.3 * torch.einsum("hd,htd->ht", query[0, :, t], keys)).softmax(-1)
        torch.testing.assert_close(found[0, t], torch.einsum("ht,htd->hd", weights, values))


def test_boundaries_are_where_positions_start_over() -> None:
    found = sequence_boundaries(torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]))
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert found["max_length_q"] == 4
    rows = sequence_boundaries(torch.arange(4).repeat(2, 1))
    assert rows["cu_seq_lens_k"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("unsupported", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"cu_seq_lens_q": None}])
def test_what_the_kernel_cannot_compute_is_refused(unsupported: dict[str, Any]) -> None:
    tensor = torch.zeros(1, 2, 3, 8)
    arguments: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 3]), "max_length_q": 3, **unsupported}
    with pytest.raises(ValueError, match=r'"varlen" does not support .* set model.attention = "sdpa"'):
        varlen_attention(None, tensor, tensor, tensor, None, **arguments)
