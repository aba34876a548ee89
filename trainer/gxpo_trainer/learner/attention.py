"""Which attention the learner's policy has, and which layout of rows goes with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gxpo_trainer.algo.packing import Layout
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.process_group import Device
from gxpo_trainer.models.load import load_config
from gxpo_trainer.models.logprobs import can_share_prompts
from gxpo_trainer.models.varlen import NAME, VARIABLE_LENGTH, WINDOWED, layer_types

MAX_DENSE_WIDTH = 4096
"""Widest packed row for which a CPU builds a dense mask."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Attention kernels for rows of several sequences that this process can run, in half precision."""

    flash_attention_2: bool = False
    varlen: bool = False


def installed_kernels(device: Device) -> Kernels:
    """torch's own kernel needs compute capability 8.0 (Ampere)."""
    if device == "cpu":
        return Kernels()
    from transformers.utils.import_utils import is_flash_attn_2_available

    ampere = torch.cuda.get_device_capability() >= (8, 0)
    return Kernels(is_flash_attn_2_available(), ampere and torch.backends.cuda.is_flash_attention_available())


def check_attention(config: RunConfig, device: Device) -> None:
    """Raise ConfigError for settings that no kernel makes possible; the learner chooses from those that it has."""
    layers = layer_types(load_config(config.model))
    every = Kernels(device == "gpu", device == "gpu")
    attention = choose_attention(config, device, every, layers)
    choose_layout(config, device, attention, layers, can_share_prompts=can_share_prompts(attention, layers))


def choose_attention(config: RunConfig, device: Device, kernels: Kernels, layers: frozenset[str]) -> str:
    """transformers' name of the attention. layers: see models.varlen.layer_types.

    | device | precision | `auto` |
    |---|---|---|
    | CPU | any | sdpa |
    | GPU | fp32 | sdpa |
    | GPU | bf16 | flash_attention_2 if installed, else varlen if the GPU and the layers allow it, else sdpa |

    With `learner.packing = "shared"`, whose mask the other kernels do not take, `auto` is sdpa.

    Raises ConfigError for a kernel that cannot run, and for packed rows that would need a dense mask.
    """
    chosen: str = config.model.attention
    half = device == "gpu" and config.learner.precision == "bf16"
    usable = {
        "flash_attention_2": half and kernels.flash_attention_2,
        NAME: half and kernels.varlen and layers <= WINDOWED,
    }
    if chosen == "auto" and config.learner.packing == "shared":
        chosen = "sdpa"
    elif chosen == "auto":
        chosen = next((name for name in ("flash_attention_2", NAME) if usable[name]), "sdpa")
    elif not usable.get(chosen, True):
        raise ConfigError(_why_unusable(chosen, half, layers))
    _refuse_dense_mask(config, device, chosen)
    return chosen


def choose_layout(
    config: RunConfig, device: Device, attention: str, layers: frozenset[str], *, can_share_prompts: bool
) -> Layout:
    """What `learner.packing = "auto"` means: on a GPU packed rows where the attention takes their boundaries, else
    padded ones; on a CPU shared prompts, since a dense mask over short rows is cheap there.

    Raises ConfigError for packed rows in a model with layers that mix the sequences of a row, and for shared prompts
    where the mask that separates the responses cannot be applied.
    """
    packing = config.learner.packing
    if packing == "auto":
        if device == "gpu":
            return "packed" if attention in VARIABLE_LENGTH and layers <= WINDOWED else "padded"
        return "shared" if can_share_prompts else "padded"
    if packing == "packed" and not layers <= WINDOWED:
        raise ConfigError(
            f'learner.packing = "packed" but the model has {min(layers - WINDOWED)} layers, which would mix the '
            'sequences of a row; set learner.packing = "padded" or "auto"'
        )
    if packing == "shared" and not can_share_prompts:
        others = sorted(layers - {"full_attention"})
        problem = f"the model has {others[0]} layers" if others else f'model.attention = "{attention}"'
        raise ConfigError(
            f'learner.packing = "shared" needs full attention by sdpa or eager, but {problem}; '
            'set learner.packing = "auto"'
        )
    return packing


def _why_unusable(chosen: str, half: bool, layers: frozenset[str]) -> str:
    if not half:
        problem = 'computes on GPUs in bf16 only; set learner.precision = "bf16" on a GPU, or'
    elif chosen == "flash_attention_2":
        problem = "needs the package flash-attn, which is not installed; install it, or"
    elif not layers <= WINDOWED:
        problem = f"cannot compute this model's {min(layers - WINDOWED)} layers;"
    else:
        problem = "needs a GPU of compute capability 8.0 or newer;"
    return f'model.attention = "{chosen}" {problem} set model.attention = "auto"'


def _refuse_dense_mask(config: RunConfig, device: Device, attention: str) -> None:
    width = config.learner.token_budget
    if config.learner.packing != "packed" or attention in VARIABLE_LENGTH:
        return
    if device == "cpu" and width <= MAX_DENSE_WIDTH:
        return
    fix = (
        'set model.attention = "auto" and learner.precision = "bf16"'
        if device == "gpu"
        else f"set learner.token_budget to at most {MAX_DENSE_WIDTH}"
    )
    raise ConfigError(
        f'learner.packing = "packed" with {attention} attention builds a dense mask of {width} × {width} tokens for '
        f'each micro-batch; {fix}, or set learner.packing = "padded" or "auto"'
    )
