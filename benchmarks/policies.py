"""A policy for the benchmarks: 10 M random weights on the starter's tokenizer."""

from __future__ import annotations

from pathlib import Path

from gxpo_trainer.models.load import STARTER_FOLDER


def ten_million(folder: Path) -> Path:
    """Qwen2 with 10 M random weights, tied embeddings, fp32."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
