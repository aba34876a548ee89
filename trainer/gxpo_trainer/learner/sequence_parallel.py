"""Sequence parallelism by DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

The ranks of a group have the same micro-batches, and each computes its share of their columns: activations, and the
logits of its tokens, are a part of those of one rank. Attention alone needs all columns, so around it the ranks
exchange columns for heads. The log-probabilities of all tokens are then put together on each rank, which computes the
same loss; its gradient flows back through the rank's own columns, so that the sum over ranks is the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gxpo_trainer.algo.packing import MicroBatch

NAME = "ulysses"
"""transformers' name of the attention that exchanges columns for heads."""


class Columns(NamedTuple):
    """A rank's columns of a micro-batch of T sampled tokens, t of which it predicts.

    input_ids, position_ids: int64[rows, share]. target_index, target_ids: int64[t], as of MicroBatch, in these columns.
    tokens: int64[t], which of the T they are; None for all.
    """

    input_ids: Tensor
    position_ids: Tensor
    target_index: Tensor
    target_ids: Tensor
    tokens: Tensor | None


class SequenceParallel:
    """This rank's part of a group of `size` consecutive ranks. attention: that the group computes on whole columns.

    Collective: all ranks of the learner construct it. It becomes transformers' attention of that NAME.
    """

    def __init__(self, size: int, attention: str) -> None:
        from deepspeed.sequence.layer import DistributedAttention
        from transformers import AttentionInterface

        self.size, self.attention = size, attention
        self._group, _ = torch.distributed.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]
        self._rank = torch.distributed.get_rank(self._group)
        self._distributed = DistributedAttention(self._whole, self._group, scatter_idx=2, gather_idx=1)
        AttentionInterface.register(NAME, self._attend)

    def adapt(self, model: Any) -> None:
        """Tell the attention of a loaded model how many query heads share one of the exchanged key heads."""
        for module in model.modules():
            if hasattr(module, "num_key_value_groups"):
                heads = module.config.num_attention_heads
                key_heads = heads // module.num_key_value_groups
                module.num_key_value_groups = heads // max(key_heads, self.size)

    def columns(self, micro: MicroBatch) -> Columns:
        """This rank's columns; the width of the micro-batch is a multiple of `size`."""
        width = micro.input_ids.shape[1]
        share = width // self.size
        own = slice(self._rank * share, (self._rank + 1) * share)
        row, column = micro.target_index // width, micro.target_index % width
        tokens = (column // share == self._rank).nonzero().flatten()
        index = (row * share + column % share)[tokens]
        return Columns(
            micro.input_ids[:, own].contiguous(),
            micro.position_ids[:, own].contiguous(),
            index,
            micro.target_ids[tokens],
            tokens,
        )

    def masks(self, model_config: Any, micro: MicroBatch) -> dict[str, Any]:
        """Keyword arguments of the model with the masks over whole rows, which transformers would build itself; the
        config names the attention over whole columns."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        shape = {
            "config": model_config,
            "inputs_embeds": torch.empty(*micro.input_ids.shape, 0, device=micro.input_ids.device),
            "attention_mask": micro.attention_mask,
            "past_key_values": None,
            "position_ids": micro.position_ids,
        }
        windowed = getattr(model_config, "sliding_window", None) is not None
        return {
            "whole_mask": create_causal_mask(**shape),
            "window_mask": create_sliding_window_causal_mask(**shape) if windowed else None,
        }

    def joined(self, values: Tensor, columns: Columns, num_tokens: int) -> Tensor:
        """float32[T] on each rank from the t values of its columns."""
        whole: Tensor = _Joined.apply(values, columns.tokens, num_tokens, self._group)  # type: ignore[no-untyped-call]
        return whole

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, None]:
        """query, key, value: [rows, heads, share, size], with as many or fewer key heads. Returns [rows, share, heads,
        size].

        Raises ValueError for what differs from head to head.
        """
        for name in ("s_aux", "position_bias"):
            if others.get(name) is not None:
                raise ValueError(f"learner.sequence_parallel does not support {name} of {type(module).__name__}; set 1")
        # Key heads are repeated where the group has more ranks.
        repeats = max(1, self.size // key.shape[1])
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=2) for each in (key, value))
        others.pop("position_ids", None)  # of this rank's columns
        result: Tensor = self._distributed(query, key, value, 0, module=module, **others)
        return result, None

    def _whole(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        module: Any,
        whole_mask: Any,
        window_mask: Any,
        **others: Any,
    ) -> Tensor:
        """Attention of some heads over all columns: [rows, width, heads, size] each."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        mask = whole_mask if others.get("sliding_window") is None else window_mask
        heads = (each.transpose(1, 2) for each in (query, key, value))
        result: Tensor = ALL_ATTENTION_FUNCTIONS[self.attention](module, *heads, mask, **others)[0]
        return result


class _Joined(torch.autograd.Function):
    """Values of all ranks at their tokens. Every rank goes on with the same function of them, so that the gradient of
    its own values is that of this rank alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, num_tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        whole = values.new_zeros(num_tokens).index_copy_(0, tokens, values)
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return gradient[tokens], None, None, None
