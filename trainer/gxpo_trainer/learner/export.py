"""A policy in memory as a folder that transformers, PEFT and vLLM load as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.models.load import load_tokenizer


def write_policy(learner: DeepSpeedLearner, config: RunConfig, folder: Path) -> None:
    """config.json, model.safetensors and tokenizer of the present weights, LoRA merged. Collective; rank 0 writes.

    Tensors that an adapter is merged into are written in fp32, and config.json names that dtype.
    """
    adapted = config.learner.lora is not None
    weights = _gather(learner.full_weights(torch.float32 if adapted else None), keep=learner.rank == 0)
    if learner.rank:
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    # One file whatever the size: a run's policy is read back by the sampler, which maps it.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model_config = copy.deepcopy(learner.model.config)
    if adapted:
        model_config.dtype = torch.float32
    model_config.save_pretrained(folder)
    generation = getattr(learner.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)


def write_adapter(learner: DeepSpeedLearner, config: RunConfig, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors for PEFT. Collective; rank 0 writes."""
    weights = _gather(learner.adapter_weights(), keep=learner.rank == 0)
    if learner.rank:
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    learner.model.peft_config["default"].save_pretrained(folder)


def _gather(named: Any, *, keep: bool) -> dict[str, Any]:
    """Whole tensors on the CPU; every rank must run the iterator to its end."""
    return {name: tensor.detach().cpu().clone() if keep else None for name, tensor in named}
