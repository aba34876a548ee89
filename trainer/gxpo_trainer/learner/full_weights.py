"""The policy's weights as a transformers checkpoint names them, gathered from any ZeRO stage.

Under LoRA an exported policy has the adapter merged, W + (alpha/rank)·B·A, computed in fp32; the model itself is not
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

PEFT_PREFIX = "base_model.model."
BASE_LAYER = ".base_layer"


def full_weights(model: nn.Module, merged_dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor in the forward pass's dtype), one parameter at a time; tied weights once.

    merged_dtype: of the tensors that an adapter is merged into, None for the forward pass's. In bf16 most of a small
    adapter is rounded away.

    Collective at ZeRO-3: every rank must run the iterator to its end. The tensor may be a view of live memory that
    is released as the iterator moves on: copy it before asking for the next one.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner.removesuffix(BASE_LAYER)) if owner.endswith(BASE_LAYER) else None
        if layer is None or leaf != "weight":
            with gathered([parameter]):
                yield plain_name(name), parameter.detach()
            continue
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with gathered([parameter, down, up]):
            merged = _merged(parameter, down, up, layer.scaling["default"])
            yield plain_name(name), merged.to(merged_dtype or parameter.dtype)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name as in a PEFT adapter file, whole tensor) of each LoRA matrix; collective as `full_weights`."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            with gathered([parameter]):
                yield name.replace(".default.", "."), parameter.detach()


def plain_name(name: str) -> str:
    """The name in a plain checkpoint of a parameter of a model that may be under PEFT."""
    return name.removeprefix(PEFT_PREFIX).replace(f"{BASE_LAYER}.", ".")


def gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
    """A context in which ZeRO-3 parameters are whole on every rank; empty for others."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


@torch.no_grad()
def _merged(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    return weight.float() + scaling * (up.float() @ down.float())
