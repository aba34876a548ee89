"""A LoRA adapter merged into its base, so that it can be evaluated as a policy."""

from __future__ import annotations

import json
from pathlib import Path

from gxpo_trainer.config import ModelConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import load_tokenizer, resolve_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, but not a full model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The adapter's base model: a folder or a hub name. Raises ConfigError."""
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}; save the adapter again") from None
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / CONFIG} names no base model; set base_model_name_or_path to its folder")
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}; save the adapter in safetensors form")
    try:
        return resolve_model(ModelConfig(path=base))
    except ConfigError as error:
        raise ConfigError(
            f"{folder}: its base model cannot be used ({error}); set base_model_name_or_path in {CONFIG} to a folder "
            "written by save_pretrained"
        ) from None


def merge_adapter(folder: Path, out: Path) -> None:
    """Write base and adapter as one model in fp32, with the base's tokenizer. Raises ConfigError.

    Merged into bf16, most of a small adapter would be rounded away.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    base = base_of(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True)
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{folder} cannot be merged into {base}: {first}; use a LoRA adapter of it") from error
    merged.save_pretrained(out)
    load_tokenizer(ModelConfig(path=base)).save_pretrained(out)
