"""A small random policy, random batches, and an independent way to score them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, with_scale

VOCABULARY = 37
TOKEN_LIMIT = 12


def tiny_policy(
    *,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    width: int = 16,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """Qwen2 with 2 layers and weights large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    more = {"max_position_embeddings": 512, "tie_word_embeddings": tied, "initializer_range": 0.2}
    return qwen2(vocabulary, width, 24, 2, 2, 1, **more).to(dtype)


def qwen2(
    vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> Qwen2ForCausalLM:
    """A random Qwen2, with tied embeddings unless `more` unties them."""
    widths = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    others = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**widths | others | more))


def by_sequence(values: list[tuple[Tensor, Tensor]]) -> Tensor:
    """float64: values of several micro-batches, each with the sequences of its values, in the order of the batch."""
    owners, flat = (torch.cat(column) for column in zip(*values, strict=True))
    return flat.detach().double()[owners.argsort(stable=True)]


def random_batch(
    *, num_prompts: int = 4, num_samples: int = 3, seed: int = 0, vocabulary: int = VOCABULARY, left_out: float = 0.0
) -> StepBatch:
    """Prompts of 2–9 and responses of 1–TOKEN_LIMIT random tokens; `left_out` is the share that is not in the loss."""
    rng = np.random.default_rng(seed)
    sequences = []
    for number in range(num_prompts):
        prompt = rng.integers(0, vocabulary, rng.integers(2, 10)).astype(np.int32)
        for _ in range(num_samples):
            length = int(rng.integers(1, TOKEN_LIMIT + 1))
            sequences.append(
                ScoredSequence(
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                    advantage=float(rng.normal()),
                    sampler_logprobs=rng.normal(-3.0, 0.5, length).astype(np.float32),
                    in_loss=bool(rng.random() >= left_out),
                    group=number,
                )
            )
    return with_scale(sequences, TOKEN_LIMIT)


def plain_logprobs(model: nn.Module, sequence: ScoredSequence, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log π and entropy of each response token: the sequence alone, all logits at once, torch's own log_softmax."""
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0]
    table = torch.log_softmax(logits / temperature, dim=-1)[len(sequence.prompt_ids) - 1 : -1]
    targets = ids[len(sequence.prompt_ids) :]
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def gradient_vector(module: nn.Module) -> Tensor:
    """All gradients of trainable parameters in one float64 vector; fails where one is missing."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    missing = [name for name, p in parameters if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return torch.cat([p.grad.flatten().double() for _, p in parameters if p.grad is not None])


def relative_difference(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()
