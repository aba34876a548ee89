"""Loads policies so that no rank holds more of one than it keeps.

| stage | while loading |
|---|---|
| 0, 1, 2 | transformers builds the model without memory and fills it tensor by tensor, on a GPU directly there |
| 3 | every layer is partitioned as it is built; rank 0 reads the files, one layer at a time is whole |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.process_group import Device, build_optimizer, deepspeed_settings, initialize_engine
from gxpo_trainer.models.load import load_config, load_policy
from gxpo_trainer.models.logprobs import PolicyModule
from gxpo_trainer.models.size import num_elements


def load_partitioned(config: RunConfig, attention: str, device: torch.device) -> Any:
    """The policy of `model`, partitioned at stage 3; under LoRA with the adapter. Collective.

    Raises ConfigError as load_policy.
    """
    settings = config.learner
    chosen = config.model.model_copy(update={"attention": attention})
    with _partitioning(config):
        return load_policy(
            chosen,
            precision=settings.precision,
            lora=settings.lora,
            device=device if device.type == "cuda" and settings.zero_stage < 3 else None,
        )


def open_engine(model: nn.Module, config: RunConfig, device: Device) -> tuple[Any, torch.optim.Optimizer]:
    """The DeepSpeed engine of a loaded policy, and the base optimizer. Collective."""
    policy = PolicyModule(model)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = build_optimizer(trainable, config.learner.optimizer)
    return initialize_engine(policy, optimizer, _settings(config, trainable, device)), optimizer


def open_frozen_engine(model: nn.Module, config: RunConfig, device: Device) -> Any:
    """A DeepSpeed engine for the forward passes of a partitioned model. Collective."""
    policy = PolicyModule(model)
    return initialize_engine(policy, None, _settings(config, list(policy.parameters()), device))


def _settings(config: RunConfig, parameters: list[nn.Parameter], device: Device) -> dict[str, Any]:
    return deepspeed_settings(
        zero_stage=config.learner.zero_stage,
        precision=config.learner.precision,
        num_trainable=sum(map(num_elements, parameters)),
        device=device,
    )


@contextmanager
def _partitioning(config: RunConfig) -> Iterator[None]:
    """Within it, at stage 3, transformers builds its models under `deepspeed.zero.Init`."""
    if config.learner.zero_stage < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers keeps a weak reference only.
    kept = HfDeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": config.learner.precision == "bf16"},
            "data_types": {"keep_in_fp32_modules": _fp32_buffers(config)},
            "zero_optimization": {"stage": 3},
        }
    )
    try:
        yield
    finally:
        del kept
        unset_hf_deepspeed_config()


def _fp32_buffers(config: RunConfig) -> list[str]:
    """Name patterns of buffers that stay fp32 in bf16: those that transformers keeps, and the frequencies of rotary
    embeddings, which `deepspeed.zero.Init` would round (far positions would then be off by whole tokens)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(load_config(config.model)), None)
    return ["inv_freq", *(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())]
