"""Policies for the benchmarks: random weights, from 3 M to 1.5 B, on the starter's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.planner.inputs import read_shape

LARGE_SHAPE = read_shape("Qwen/Qwen2.5-1.5B-Instruct")


def ten_million(folder: Path) -> Path:
    """Qwen2 with 10 M random weights, tied embeddings, fp32."""
    return _random_policy(folder, hidden=384, intermediate=1024, layers=6, heads=6)


def three_million(folder: Path) -> Path:
    """Qwen2 with 3 M random weights, tied embeddings, fp32."""
    return _random_policy(folder, hidden=256, intermediate=640, layers=4, heads=4)


def one_and_a_half_billion(folder: Path, device: str) -> Path:
    """Random weights in the shape of Qwen2.5-1.5B, tied embeddings, bf16; made on `device`."""
    shape = LARGE_SHAPE
    return _random_policy(
        folder,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        key_value_heads=shape.kv_heads,
        vocabulary=shape.vocabulary,
        device=device,
        precision="bfloat16",
    )


def grown(folder: Path, source: Path, *, layers: int, intermediate: int) -> Path:
    """The Qwen2 policy of `source` with more layers and wider ones, whose further weights are 0: it samples the same
    tokens with more work."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    small = Qwen2ForCausalLM.from_pretrained(source)
    config = Qwen2Config.from_pretrained(source)
    config.num_hidden_layers, config.intermediate_size = layers, intermediate
    config.layer_types = ["full_attention"] * layers
    policy = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    known = small.state_dict()
    with torch.no_grad():
        for name, parameter in policy.state_dict().items():
            parameter.zero_()
            if name in known:
                parameter[tuple(map(slice, known[name].shape))] = known[name]
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _random_policy(
    folder: Path,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_value_heads: int | None = None,
    vocabulary: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary or -(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        policy = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    policy.to(getattr(torch, precision)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
