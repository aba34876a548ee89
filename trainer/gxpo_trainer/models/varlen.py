"""Attention over rows of several sequences by torch's variable-length kernel, as an attention of transformers.

`register()` adds it to transformers' registry of attention functions under the name `varlen`. transformers builds no
mask for such a function; the sequence boundaries reach it as the keyword arguments of `sequence_boundaries`, which
`flash_attention_2` takes too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "varlen"
VARIABLE_LENGTH = (NAME, "flash_attention_2")
"""Attention functions that take sequence boundaries; for others transformers builds a dense mask of a packed row."""
WINDOWED = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose attention is causal within a sequence, over all of it or over a window."""


def register() -> None:
    """Make `attn_implementation="varlen"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)


def layer_types(model_config: Any) -> frozenset[str]:
    """Kinds of layers of a transformers config, such as `full_attention`, `sliding_attention`, `linear_attention`."""
    return frozenset(getattr(model_config, "layer_types", None) or ["full_attention"])


def sequence_boundaries(position_ids: Tensor) -> dict[str, Any]:
    """Boundaries of the sequences in rows, as transformers names them; a sequence starts where its position is 0.

    position_ids: int64[rows, width]. cu_seq_lens: int32[sequences + 1], in the order of the flattened rows.
    """
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([flat.numel()])])
    boundaries, longest = ends.to(torch.int32), int(ends.diff().max())
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. query, key, value: [rows, heads, width, size], maybe with fewer key heads.

    Returns [rows, width, heads, size]. Raises ValueError for what the kernel cannot compute.
    """
    from torch.nn.attention.varlen import varlen_attn

    unsupported = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    if unsupported or cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        what = unsupported[0] if unsupported else "rows without sequence boundaries"
        raise ValueError(f'model.attention = "{NAME}" does not support {what}; set model.attention = "sdpa"')
    rows, _, width, _ = query.shape
    flat = [tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value)]
    output = varlen_attn(
        *flat,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor), "without return_aux the kernel returns its output alone"
    return output.unflatten(0, (rows, width)), None
