"""Whether a model can be split over the devices of one engine, from its config.json. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import ConfigError


def check_tensor_parallel(folder: Path, tensor_parallel: int) -> None:
    """Raise ConfigError when vLLM cannot give each device the same number of attention heads.

    Key and value heads are split as well, or replicated where there are fewer of them than devices.
    """
    if tensor_parallel == 1:
        return
    heads, key_value_heads = attention_heads(folder)
    setting = f"placement.tensor_parallel = {tensor_parallel}"
    possible = [t for t in range(1, heads + 1) if _divides(t, heads, key_value_heads)]
    if tensor_parallel not in possible:
        what = f"{heads} attention heads"
        what += f" and {key_value_heads} key/value heads" if key_value_heads != heads else ""
        raise ConfigError(
            f"{setting} does not divide the {what} of the model in {folder.name}; set it to one of "
            f"{', '.join(map(str, possible))}"
        )


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


def _divides(devices: int, heads: int, key_value_heads: int) -> bool:
    return heads % devices == 0 and (key_value_heads % devices == 0 or devices % key_value_heads == 0)
