"""Whether the attention heads of a model can be divided among the devices of one engine."""

from __future__ import annotations

_MOST_DEVICES = 1024
"""Largest number that a message suggests; a config.json may state any number of heads."""


def uneven_split(heads: int, key_value_heads: int, tensor_parallel: int, model: str) -> str | None:
    """Why vLLM cannot give each device the same number of attention heads, and what to set; None where it can.

    Key and value heads are split as well, or replicated where there are fewer of them than devices. model: the model
    in words.
    """
    if _divides(tensor_parallel, heads, key_value_heads):
        return None
    possible = [t for t in range(1, min(heads, _MOST_DEVICES) + 1) if _divides(t, heads, key_value_heads)]
    what = f"{heads} attention heads"
    what += f" and {key_value_heads} key/value heads" if key_value_heads != heads else ""
    return (
        f"placement.tensor_parallel = {tensor_parallel} does not divide the {what} of {model}; set it to one of "
        f"{', '.join(map(str, possible))}"
    )


def _divides(devices: int, heads: int, key_value_heads: int) -> bool:
    return heads % devices == 0 and (key_value_heads % devices == 0 or devices % key_value_heads == 0)
