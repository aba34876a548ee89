"""Tiny random models of the families that people bring, built here, with a letter-by-letter tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = {"<pad>": 0, "<end>": 1, "<unk>": 2}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_HEADS = {"head_dim": 32}
_NEOX = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
_MAMBA = {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.1}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1}
_WINDOW = {"sliding_window": 16}

FAMILIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "qwen2": lambda tokens: Qwen2Config(**SHAPE, **tokens),
    "qwen3": lambda tokens: Qwen3Config(**SHAPE, **_HEADS, **tokens),
    "llama": lambda tokens: LlamaConfig(**SHAPE, **tokens),
    "mistral": lambda tokens: MistralConfig(**SHAPE, **_HEADS, **_WINDOW, **tokens),
    "gemma2": lambda tokens: Gemma2Config(**SHAPE, **_HEADS, **_WINDOW, **tokens),
    "gemma3_text": lambda tokens: Gemma3TextConfig(**SHAPE, **_HEADS, **_WINDOW, **tokens),
    "phi3": lambda tokens: Phi3Config(**SHAPE, **tokens),
    "gpt_neox": lambda tokens: GPTNeoXConfig(**_NEOX, **tokens),
    "gpt2": lambda tokens: GPT2Config(**_GPT2, **tokens),
    "qwen3_moe": lambda tokens: Qwen3MoeConfig(
        **SHAPE, **_HEADS, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, **tokens
    ),
    "mamba": lambda tokens: MambaConfig(**_MAMBA, **tokens),
    "t5": lambda tokens: T5Config(**_T5, **tokens),
}
"""Config of each family by `model_type`, from the settings of its tokenizer."""


def save_own_model(folder: Path) -> Path:
    """What a reader of the documentation brings: a Llama of 3 million parameters with its own chat template."""
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    return save_family(folder, "llama", template, **shape, head_dim=64)


def save_tokenizer(folder: Path, chat_template: str | None = None) -> dict[str, Any]:
    """A tokenizer with a token for each printable character; the model settings that follow from it."""
    vocabulary = SPECIAL | {letter: number for number, letter in enumerate(LETTERS, len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=chat_template
    )
    fast.save_pretrained(folder)
    return {"vocab_size": len(vocabulary), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


def save_family(folder: Path, family: str, chat_template: str | None = None, **settings: Any) -> Path:
    """A random model of `family` in fp32; settings: of its config, where they differ."""
    torch.manual_seed(0)
    config = FAMILIES[family](save_tokenizer(folder, chat_template))
    config.update(settings)
    model = T5ForConditionalGeneration(config) if family == "t5" else AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)
    return folder
