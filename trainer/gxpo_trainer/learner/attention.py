"""Which attention kernel the learner's policy has, and which layout of rows goes with it."""

from __future__ import annotations

import importlib.util
from typing import cast

from gxpo_trainer.algo.batch import Layout
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.process_group import Device

VARIABLE_LENGTH = ("flash_attention_2",)
"""Kernels that take the boundaries of packed sequences. For all others transformers builds a dense mask of the row."""


def flash_attention_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def choose_attention(config: RunConfig, device: Device, *, flash_installed: bool) -> str:
    """transformers' name of the kernel. `auto`: flash attention on a GPU in bf16 where it is installed, else sdpa.

    Raises ConfigError for packed rows on a GPU with a kernel that needs a dense mask over them.
    """
    chosen = config.model.attention
    if chosen == "auto":
        flash = device == "gpu" and config.learner.precision == "bf16" and flash_installed
        chosen = "flash_attention_2" if flash else "sdpa"
    width = config.learner.token_budget
    if device == "gpu" and config.learner.packing == "packed" and chosen not in VARIABLE_LENGTH:
        raise ConfigError(
            f'learner.packing = "packed" with {chosen} attention builds a dense mask of {width} × {width} tokens for '
            'each micro-batch; install flash-attn and set model.attention = "flash_attention_2", or set '
            'learner.packing = "padded" or "auto"'
        )
    return chosen


def choose_layout(config: RunConfig, device: Device, attention: str, *, can_share_prompts: bool) -> Layout:
    """What `learner.packing = "auto"` means: on a GPU packed rows where the kernel takes their boundaries, else padded
    ones; on a CPU shared prompts, since a dense mask over short rows is cheap there."""
    if config.learner.packing != "auto":
        return cast(Layout, config.learner.packing)
    if device == "gpu":
        return "packed" if attention in VARIABLE_LENGTH else "padded"
    return "shared" if can_share_prompts else "padded"
