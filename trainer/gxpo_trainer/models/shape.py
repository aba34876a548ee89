"""Whether a model can be split over the devices of one engine, from its config.json. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.heads import uneven_split


def check_tensor_parallel(folder: Path, tensor_parallel: int) -> None:
    """Raise ConfigError when vLLM cannot give each device the same number of attention heads (`uneven_split`)."""
    if tensor_parallel == 1:
        return
    sentence = uneven_split(*attention_heads(folder), tensor_parallel, f"the model in {folder.name}")
    if sentence is not None:
        raise ConfigError(sentence)


def attention_heads(folder: Path) -> tuple[int, int]:
    """Attention heads and key/value heads of a model folder. Raises ConfigError where its config.json lacks them."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: config.json of {folder.name} cannot be read: {error}") from None
    # Models with several inputs have the shape of their language model in `text_config`.
    text: dict[str, Any] = config.get("text_config") or config
    heads = text.get("num_attention_heads") or text.get("n_head")
    if not isinstance(heads, int) or heads < 1:
        raise ConfigError(
            f"model.path: config.json of {folder.name} has no num_attention_heads, so placement.tensor_parallel "
            "cannot be checked; set it to 1"
        )
    return heads, text.get("num_key_value_heads") or heads
