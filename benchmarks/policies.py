"""Policies for the benchmarks: 3 M and 10 M random weights on the starter's tokenizer."""

from __future__ import annotations

from pathlib import Path

from gxpo_trainer.models.load import STARTER_FOLDER


def ten_million(folder: Path) -> Path:
    """Qwen2 with 10 M random weights, tied embeddings, fp32."""
    return _random_policy(folder, hidden=384, intermediate=1024, layers=6, heads=6)


def three_million(folder: Path) -> Path:
    """Qwen2 with 3 M random weights, tied embeddings, fp32."""
    return _random_policy(folder, hidden=256, intermediate=640, layers=4, heads=4)


def _random_policy(folder: Path, *, hidden: int, intermediate: int, layers: int, heads: int) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
