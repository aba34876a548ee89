"""Log-probabilities of response tokens, in bounded memory.

The loss needs one number per response token, so only the positions that predict one pass through the head, in chunks;
the backward pass recomputes each chunk's logits. If all logits fit into one chunk they are kept and not recomputed.

Rows of several sequences use torch's variable-length kernel: `models.load_policy` adds it to transformers' attention
functions under the name `varlen`. transformers builds no mask for such a function; the sequence boundaries reach it as
the keyword arguments of `sequence_boundaries`, which `flash_attention_2` takes too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gxpo_trainer.algo.losses import TokenOutputs
from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config.engines import logits_chunk
from gxpo_trainer.learner.sequence_parallel import Columns, SequenceParallel

NAME = "varlen"
VARIABLE_LENGTH = (NAME, "flash_attention_2")
"""Attention functions that take sequence boundaries; for others transformers builds a dense mask of a packed row."""
WINDOWED = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose attention is causal within a sequence, over all of it or over a window."""


def layer_types(model_config: Any) -> frozenset[str]:
    """Kinds of layers of a transformers config, such as `full_attention`, `sliding_attention`, `linear_attention`.

    Some have a window and do not list their layers (Mistral, Phi-3): all of them attend to it alone.
    """
    windowed = getattr(model_config, "sliding_window", None) is not None
    default = "sliding_attention" if windowed else "full_attention"
    return frozenset(getattr(model_config, "layer_types", None) or [default])


def attention_of(model_config: Any) -> str:
    """transformers' name of the attention of a loaded model, from its config."""
    name: str = model_config._attn_implementation
    return name


def with_attention(model_config: Any, name: str) -> Any:
    """A copy of a model's config that names another attention, for transformers' masks."""
    changed = copy.copy(model_config)
    changed._attn_implementation = name
    return changed


def sequence_boundaries(position_ids: Tensor) -> dict[str, Any]:
    """Boundaries of the sequences in rows, as transformers names them; a sequence starts where its position is 0.

    position_ids: int64[rows, width]. cu_seq_lens: int32[sequences + 1], in the order of the flattened rows.
    """
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([flat.numel()])])
    boundaries, longest = ends.to(torch.int32), int(ends.diff().max())
    return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}


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
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
    output = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor), "without return_aux the kernel returns its output alone"
    return output.view(rows, width, *output.shape[1:]), None


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter; a partitioned one is empty, but knows its shape."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class PolicyModule(nn.Module):
    """Wraps a transformers causal LM (with or without PEFT LoRA) to return log-probabilities of response tokens.

    The backbone is called as a module, and the head's weight is a direct parameter of the submodule `scorer`, so
    ZeRO-3's hooks gather both. parallel: of ranks that share the columns of their micro-batches. chunk_elements: most
    logits in memory; None for what suits the device.

    Raises ValueError for a model whose head is not a linear map without bias; factors of the logits are refused before
    (`planner.architectures`).
    """

    head: nn.Linear
    backbone: nn.Module
    scorer: TokenScorer

    def __init__(
        self, model: Any, parallel: SequenceParallel | None = None, *, chunk_elements: int | None = None
    ) -> None:
        super().__init__()
        self.model, self.parallel = model, parallel
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = causal_lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"model.path: the head of {type(causal_lm).__name__} is {type(head).__name__}, not a linear map "
                "without bias; use another model"
            )
        self.scorer = TokenScorer(head, chunk_elements)
        # Bypass module registration: both are already part of `model`.
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "backbone", getattr(causal_lm, causal_lm.base_model_prefix))

    def forward(self, micro: MicroBatch, temperature: float, with_entropy: bool) -> TokenOutputs:
        """log π(token), float32[T], with gradient; entropy of the predicting distribution, float32[T], without."""
        if self.scorer.weight is not self.head.weight:
            raise RuntimeError("the head's weight was replaced after PolicyModule was created; create it last")
        parallel, config = self.parallel, self.model.config
        attention = attention_of(config) if parallel is None else parallel.attention
        mask = self._attention_mask(micro, attention)
        own = Columns(micro.input_ids, micro.position_ids, micro.target_index, micro.target_ids, None)
        settings: dict[str, Any] = {}
        if parallel is not None:
            own = parallel.columns(micro)
            settings, mask = parallel.masks(with_attention(config, attention), micro), None
        if attention in VARIABLE_LENGTH:
            settings |= sequence_boundaries(micro.position_ids)
        output = self.backbone(
            input_ids=own.input_ids, position_ids=own.position_ids, attention_mask=mask, use_cache=False, **settings
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, own.target_index)
        logprobs, entropy = self.scorer(hidden, own.target_ids, temperature, with_entropy)
        if parallel is not None:
            logprobs = parallel.joined(logprobs, own, len(micro.target_ids))
            entropy = parallel.joined(entropy, own, len(micro.target_ids)) if with_entropy else entropy
        return TokenOutputs(logprobs, entropy if with_entropy else None)

    def _attention_mask(self, micro: MicroBatch, attention: str) -> Tensor | None:
        mask = micro.attention_mask
        if mask is None:
            return None
        if not can_share_prompts(attention, layer_types(self.model.config)):  # a teacher's layers may differ
            raise ValueError('learner.packing = "shared" needs full attention with sdpa or eager; use padded or packed')
        if attention == "sdpa":
            return mask
        # The eager kernel adds its mask to the scores.
        dtype = self.head.weight.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def can_share_prompts(attention: str, layers: frozenset[str]) -> bool:
    """Whether rows may hold a prompt once for several responses: every layer must take an explicit mask."""
    return attention in ("sdpa", "eager") and layers == {"full_attention"}


class TokenScorer(nn.Module):
    """log softmax(W h / temperature)[target] for T hidden states, through the head's own weight."""

    def __init__(self, head: nn.Linear, chunk_elements: int | None) -> None:
        super().__init__()
        self.weight = head.weight
        self.vocab_size = whole_shape(head.weight)[0]
        self.chunk_elements = chunk_elements

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """hidden [T, width], targets int64[T] → log-probabilities float32[T], entropies float32[T] (or empty)."""
        if self.chunk_elements is None:
            on_gpu = hidden.device.type == "cuda"
            memory = torch.cuda.get_device_properties(hidden.device).total_memory if on_gpu else 0
            self.chunk_elements = logits_chunk(memory)
        chunk = max(1, self.chunk_elements // self.vocab_size)
        result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, targets, temperature, chunk, with_entropy
        )
        return result


class _ChunkedLogprobs(torch.autograd.Function):
    """d logπ(y)/dz = onehot(y) − softmax(z), with z = W h / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=dtype)
        entropy = hidden.new_empty(hidden.shape[0] if with_entropy else 0, dtype=dtype)
        probabilities = None
        for part in _parts(hidden.shape[0], chunk):
            log_softmax: Tensor | None = None
            probabilities = None  # those of the chunk before are free now
            log_softmax = _log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_softmax.gather(1, targets[part, None]).squeeze(1)
            if with_entropy:
                probabilities = log_softmax.exp()
                entropy[part] = -torch.linalg.vecdot(probabilities, log_softmax)
            elif hidden.shape[0] <= chunk:
                probabilities = log_softmax.exp_()
        ctx.kept = hidden.shape[0] <= chunk
        ctx.save_for_backward(hidden, weight, targets, *([probabilities] if ctx.kept else []))
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        num_tokens = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over many chunks are accumulated in fp32: bf16 rounding would distort GXPO's ratio g¹/g⁰.
        sum_dtype = weight.dtype if kept else torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        for part in _parts(num_tokens, ctx.chunk):
            grad_logits = kept[0] if kept else _log_softmax(hidden[part], weight, ctx.temperature).exp_()
            scale = grad_logprobs[part, None] / ctx.temperature
            grad_logits = grad_logits * -scale if kept else grad_logits.mul_(-scale)
            grad_logits.scatter_add_(1, targets[part, None], scale)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad_logits @ weight).to(hidden.dtype)
            if grad_weight is not None and grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[part].to(weight.dtype))
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part].to(weight.dtype)
            del grad_logits
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32[chunk, vocabulary]; the product in the weight's precision, like the sampler's."""
    logits = (hidden.to(weight.dtype) @ weight.T).to(torch.promote_types(weight.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)
